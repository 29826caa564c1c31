"""`python -m backend.sglang.serve --model-path MODEL [any flag of SGLang]`: SGLang with the window protocol.

Adds to the user's flags and environment what the adapter needs, then becomes the server (server.py). A new program,
because SGLang reads its environment while it is imported. A flag of the user's that contradicts the adapter is refused
by the server (fences.py); all others are SGLang's business.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import click
import torch

from backend.engine.checkpoint import CheckpointError
from backend.protocol import VerifyShape
from backend.sglang.hf_folder import as_hf_folder
from backend.sglang.settings import AdapterSettings
from backend.sglang.version_gate import UnsupportedVersionError, check_version

NEEDED_FLAGS = ("--disable-overlap-schedule", "--cuda-graph-backend-prefill=disabled")
CPU_FLAGS = (
    *("--dtype", "float32"),
    *("--sampling-backend", "pytorch"),
    "--sleep-on-idle",
    *("--max-total-tokens", "16384"),  # SGLang's own idea is most of the machine's memory.
)
"""Defaults, which flags of the user's override."""
CPU_ENVIRONMENT = {
    "SGLANG_PLATFORM": "verbatim_cpu",
    "TORCHDYNAMO_DISABLE": "1",  # Compiled helpers have other bits than eager ones, and need a C++ compiler.
    "OMP_NUM_THREADS": "1",  # With more, the rows of a product fall into classes.
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--model-path", required=True, help="A Hugging Face folder, or what `--model` of the engine takes.")
@click.option("--verify-groups", default=8, show_default=True, type=click.IntRange(1))
@click.option("--verify-window", default=32, show_default=True, type=click.IntRange(4))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(model_path: str, verify_groups: int, verify_window: int, flags: tuple[str, ...]) -> None:
    """Start SGLang with the window protocol beside its own endpoints. All other FLAGS are SGLang's."""
    try:
        check_version()
        folder = as_hf_folder(model_path)
    except (UnsupportedVersionError, CheckpointError) as error:
        raise click.ClickException(str(error)) from error
    if _value(flags, "--device") is None and not torch.cuda.is_available():
        flags = ("--device", "cpu", *flags)
    settings = AdapterSettings(VerifyShape(groups=verify_groups, window=verify_window))
    argv = [sys.executable, "-m", "backend.sglang.server", "--model-path", str(folder)]
    argv += ["--served-model-name", folder.resolve().name, *arguments(flags)]
    os.execve(sys.executable, argv, environment(flags, os.environ) | settings.to_environment())


def arguments(flags: Sequence[str]) -> list[str]:
    """The user's flags behind those that the adapter needs."""
    return [*NEEDED_FLAGS, *(CPU_FLAGS if _value(flags, "--device") == "cpu" else ()), *flags]


def environment(flags: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The given environment with what SGLang needs on the device that `flags` name; what is given wins."""
    if _value(flags, "--device") != "cpu":
        return dict(given)
    ranks = _value(flags, "--tp", "--tp-size", "--tensor-parallel-size") or "1"
    # SGLang wants a group of cores for each rank, and binds to none of them without kernels that we do not need.
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * int(ranks) if ranks.isdecimal() else "0")}
    return {**CPU_ENVIRONMENT, **bind, **given}


def _value(flags: Sequence[str], *names: str) -> str | None:
    """The value of the last flag with one of these names."""
    found = None
    for index, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            found = value if equals else next(iter(flags[index + 1 : index + 2]), None)
    return found


if __name__ == "__main__":
    main(prog_name="verbatim backend sglang")
