"""`python -m backend.server`: serve one model until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import sys
import threading
from types import FrameType
from typing import Literal, cast

import click
import uvicorn

from backend.engine.checkpoint import CheckpointError
from backend.engine.engine import Engine, EngineError
from backend.engine.memory import give_back
from backend.engine.open_checkpoint import open_checkpoint
from backend.kernels.platform import PlatformError, open_platform
from backend.server.app import Backend, create_app
from backend.server.logs import RequestIds, configure_logs
from backend.settings import WINDOW, Device, Dtype, EngineSettings

_OPEN_SHARE = 0.5  # Reading the file is about half of the start-up work, packing the weights the other half.

log = logging.getLogger(__name__)


@click.command(context_settings={"auto_envvar_prefix": "VERBATIM_ENGINE", "show_default": True})
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8043, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
@click.option(
    "--model", default="smollm2-135m-instruct", show_default=True, help="A GGUF file or a Hugging Face folder."
)
@click.option(
    "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="Where it computes."
)
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Of weights and arithmetic.",
)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="OpenMP threads for one pass.")
@click.option("--kv-bytes", default=1 << 30, show_default=True, type=click.IntRange(1), help="Bound of the KV cache.")
@click.option(
    "--verify-groups", default=8, show_default=True, type=click.IntRange(1), help="Requests in one verification pass."
)
@click.option(
    "--verify-window",
    show_default=f"{WINDOW['cpu']}, or {WINDOW['cuda']} with cuda",
    type=click.IntRange(2),
    help="Rows of each request in one verification pass.",
)
@click.option(
    "--log-format",
    default="text",
    show_default=True,
    type=click.Choice(["text", "json"]),
    help="How log lines are written: for people, or as one JSON object each.",
)
def main(
    host: str,
    port: int,
    model: str,
    device: str,
    dtype: str,
    threads: int,
    kv_bytes: int,
    verify_groups: int,
    verify_window: int | None,
    log_format: str,
) -> None:
    """Serve the window protocol over one model.

    As `verbatim backend engine` it takes --config FILE as well, a YAML file of settings like these.
    """
    configure_logs(cast(Literal["text", "json"], log_format), sys.stderr)
    kind = cast(Device, device)
    try:
        platform = open_platform(kind)
    except PlatformError as error:
        raise click.ClickException(str(error)) from error
    settings = EngineSettings(
        model=model,
        dtype=cast(Dtype, dtype),
        threads=threads,
        kv_bytes=kv_bytes,
        verify_groups=verify_groups,
        verify_window=verify_window or WINDOW[kind],
        device=kind,
    )
    backend = Backend()
    config = uvicorn.Config(
        RequestIds(create_app(backend)),
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    listener = config.bind_socket()  # Before loading: it exits where the port is taken.
    server = _Server(config, backend)
    failures: list[str] = []

    def fail(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    def load() -> None:
        try:
            checkpoint = open_checkpoint(settings.model, lambda share: backend.loading(share * _OPEN_SHARE))
            engine = Engine(
                checkpoint,
                settings,
                lambda share: backend.loading(_OPEN_SHARE + share * (1 - _OPEN_SHARE)),
                on_breakdown=lambda: fail("the engine broke down"),
                platform=platform,
            )
            tokenizer = checkpoint.tokenizer
            del checkpoint
            give_back()
            engine.start()
            backend.ready(engine, tokenizer)
        except (CheckpointError, EngineError, OSError, MemoryError, RuntimeError) as error:
            fail(str(error))  # Out of memory is a RuntimeError of torch's.
        except BaseException:
            fail("loading broke down")
            raise

    threading.Thread(target=load, name="loader", daemon=True).start()
    server.run(sockets=[listener])
    backend.stop()
    if failures:
        raise click.ClickException(failures[0])


class _Server(uvicorn.Server):
    """Stops the engine as soon as it is told to stop: what is in flight ends with an error instead of being cut off."""

    def __init__(self, config: uvicorn.Config, backend: Backend):
        super().__init__(config)
        self._backend = backend

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In a thread: the engine finishes its pass first, and this is a signal handler.
        threading.Thread(target=self._backend.stop, name="stopper").start()
        super().handle_exit(sig, frame)


if __name__ == "__main__":
    main(prog_name="verbatim backend engine")
