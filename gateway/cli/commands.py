"""The commands and their flags. What they do lives elsewhere: serving in app.py, supervising in up.py.

A flag that is not given is not passed on: each default has one owner, and is only shown here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from gateway.app import serve
from gateway.cli.admin import admin
from gateway.cli.demo import PROMPTS, Plan, run_demo
from gateway.cli.installed import require
from gateway.cli.policy import keys, policy
from gateway.cli.up import BACKEND_COMMANDS, run_up
from gateway.errors import ConfigError, GatewayError
from gateway.models_file import ModelConfig, load_models
from gateway.receipts.key_files import KeyFileError, KeyFolder
from gateway.settings import Settings, read_settings
from policies.document import DEFAULT_POLICY, FixedPolicy
from policies.policy_file import PolicyFile, Unfit
from policies.sections import FileMistakes

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]

GATEWAY_FLAGS = [
    click.option("--host", help="Address to listen on.  [default: 127.0.0.1]"),
    click.option("--port", type=int, help="Port to listen on.  [default: 8042]"),
    click.option("--policy", help="YAML file that says who gets which guarantee; read again when it changes."),
    click.option(
        "--redis", help="URL of the Redis that all gateways count limits and keep answers in; better in VERBATIM_REDIS."
    ),
    click.option("--admin-key", help="Hash of the key that opens /admin/v1 and /metrics, from `verbatim keys new`."),
    click.option("--max-concurrent", type=int, help="Choices generated at a time; beyond it requests get 429."),
    click.option("--cache-bytes", type=int, help="Memory for the answers that a policy has kept."),
    click.option("--receipt-keys", help="Folder of the keys that receipts are signed with."),
    click.option("--receipt-bytes", type=int, help="Memory for receipts that are kept here and not in Redis."),
    click.option("--max-body-bytes", type=int, help="Largest request body."),
    click.option("--connect-timeout-s", type=float, help="For connecting to the backend."),
    click.option("--first-byte-timeout-s", type=float, help="For the backend to begin its answer."),
    click.option("--call-timeout-s", type=float, help="For one call to the backend in all."),
    click.option("--start-timeout-s", type=float, help="For the backend to become ready."),
    click.option("--health-interval-s", type=float, help="Between two looks at the health of each backend."),
    click.option("--health-timeout-s", type=float, help="For a backend to say how it is."),
    click.option("--drain-timeout-s", type=float, help="For requests in flight after SIGTERM."),
]
DEFAULT_MODEL = "smollm2-135m-instruct"
# The engine owns these defaults and ranges. Said again here, where it cannot be imported; a test compares the two.
ENGINE_FLAGS = [
    click.option("--model", show_default=DEFAULT_MODEL, help="GGUF file or Hugging Face folder."),
    click.option("--device", show_default="cpu", type=click.Choice(["cpu", "cuda"])),
    click.option("--dtype", show_default="bfloat16", type=click.Choice(["float32", "bfloat16"])),
    click.option("--threads", show_default="1", type=click.IntRange(1), help="Threads of the engine."),
    click.option("--kv-bytes", show_default="1073741824", type=click.IntRange(1), help="Memory for the KV cache."),
    click.option(
        "--verify-groups", show_default="8", type=click.IntRange(1), help="Requests in one verification pass."
    ),
    click.option(
        "--verify-window",
        show_default="32, or 64 with cuda",
        type=click.IntRange(2),
        help="Rows of each request in one verification pass.",
    ),
]

BACKEND_FLAG = click.option(
    "--backend",
    "kind",
    default="engine",
    show_default=True,
    type=click.Choice(list(BACKEND_COMMANDS)),
    help="The embedded engine, or a stock SGLang (see docs/sglang.md).",
)


def _flags(options: list[Option]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group()
@click.version_option(package_name="verbatim", prog_name="verbatim")
def main() -> None:
    """An OpenAI-compatible gateway that makes LLM inference reproducible, bit for bit."""


@main.command()
@BACKEND_FLAG
@_flags(GATEWAY_FLAGS)
@_flags(ENGINE_FLAGS)
def up(kind: str, **flags: Any) -> None:
    """Start an engine and a gateway on this machine, and stop both with Ctrl-C."""
    engine_flags = {name: flags.pop(name) for name in _names(ENGINE_FLAGS)}
    require(kind, BACKEND_COMMANDS[kind][0])
    # The backend's address is ours to choose; the settings are read here too so that a mistake shows before any start.
    settings = _settings({**flags, "backend": f"http://127.0.0.1:{_free_port()}"})
    _policies(settings, _receipt_keys(settings))
    bind(settings).close()
    code = asyncio.run(run_up(settings, _backend_argv(kind, engine_flags), _argv(flags), BACKEND_COMMANDS[kind]))
    sys.exit(code)


@main.command()
@click.option("--url", help="Base URL of a running Verbatim; without it the demo starts one of its own.")
@click.option("--api-key", envvar="VERBATIM_API_KEY", help="For a Verbatim whose policy asks for one.")
@click.option("--prompts", default=8, show_default=True, type=click.IntRange(1, len(PROMPTS)), help="Questions to ask.")
@click.option(
    "--loads", default="1,8,16,32", show_default=True, help="Numbers of requests in flight, one after the other."
)
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each answer.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 2))
@click.option("--seed", default=42, show_default=True)
@click.option(
    "--json", "report", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here as JSON."
)
@BACKEND_FLAG
@_flags(ENGINE_FLAGS)
def demo(
    url: str | None,
    api_key: str | None,
    prompts: int,
    loads: str,
    tokens: int,
    temperature: float,
    seed: int,
    report: Path | None,
    kind: str,
    **engine_flags: Any,
) -> None:
    """Ask the same questions under changing load, in mode off and in mode verified, and compare the answers.

    Exits with status 1 if two verified answers to one question differ in a token or in a bit of a logprob.
    """
    try:
        in_flight = tuple(int(load) for load in loads.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{loads!r} is no list of numbers", param_hint="--loads") from error
    if min(in_flight) < 1:
        raise click.BadParameter("each load must be at least 1", param_hint="--loads")
    plan = Plan(prompts=prompts, loads=in_flight, tokens=tokens, temperature=temperature, seed=seed)
    _backend_argv(kind, engine_flags)
    if url is None:
        require(kind, BACKEND_COMMANDS[kind][0])
    sys.exit(run_demo(plan, url, api_key, ["--backend", kind, *_argv(engine_flags)], _free_port(), report))


@main.command()
@click.option("--backend", help="Base URL of the one backend, such as http://127.0.0.1:9000.")
@click.option("--models", help="YAML file of models and who serves each; instead of --backend.")
@_flags(GATEWAY_FLAGS)
def gateway(**flags: Any) -> None:
    """Serve the OpenAI API in front of a backend that is already running."""
    settings = _settings(flags)
    models, receipt_keys = _models(settings), _receipt_keys(settings)
    policies = _policies(settings, receipt_keys)
    with bind(settings) as listener:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(settings, models, policies, receipt_keys, listener, _announce))
        except GatewayError as error:
            raise click.ClickException(error.message) from error


main.add_command(admin)
main.add_command(policy)
main.add_command(keys)


@main.group()
def backend() -> None:
    """Start one kind of backend alone."""


@backend.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(arguments: tuple[str, ...]) -> None:
    """The embedded engine; all flags are its own."""
    _become("engine", arguments)


@backend.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sglang(arguments: tuple[str, ...]) -> None:
    """A stock SGLang server; besides --model-path and --verify-..., all flags are SGLang's own."""
    _become("sglang", arguments)


def _become(kind: str, arguments: tuple[str, ...]) -> None:
    command = BACKEND_COMMANDS[kind]
    require(kind, command[0])
    os.execv(command[0], [*command, *arguments])


def _names(options: list[Option]) -> list[str]:
    probe = click.Command(None)
    for option in options:
        option(probe)
    return [name for parameter in probe.params if (name := parameter.name) is not None]


def _argv(flags: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in flags.items() if value is not None}
    return [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), str(value))]


def _backend_argv(kind: str, flags: dict[str, Any]) -> list[str]:
    """The engine's flags as the backend of this kind calls them."""
    if kind == "engine":
        return _argv(flags)
    for name in ("threads", "kv_bytes"):
        if flags[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is a flag of the engine, not of {kind}")
    model = flags["model"] or DEFAULT_MODEL
    return ["--model-path", model, "--log-level", "warning", *_argv({**flags, "model": None})]


def _settings(flags: dict[str, Any]) -> Settings:
    try:
        return read_settings(flags, os.environ)
    except ConfigError as error:
        raise click.UsageError(error.message) from error


def _announce(base_url: str) -> None:
    click.echo(f"Serving on {base_url}")


def _receipt_keys(settings: Settings) -> KeyFolder:
    try:
        return KeyFolder(None if settings.receipt_keys is None else Path(settings.receipt_keys))
    except OSError as error:
        raise click.UsageError(f"receipt_keys: cannot read {settings.receipt_keys}: {error.strerror}") from error
    except KeyFileError as error:
        raise click.UsageError(f"receipt_keys: {error}") from error


def _policies(settings: Settings, receipt_keys: KeyFolder) -> PolicyFile | FixedPolicy:
    if settings.policy is None:
        return FixedPolicy(DEFAULT_POLICY)
    try:
        return PolicyFile(Path(settings.policy), receipt_keys.check)
    except OSError as error:
        raise click.UsageError(f"policy: cannot read {settings.policy}: {error.strerror}") from error
    except Unfit as error:
        raise click.UsageError(f"{settings.policy}: {error}") from error
    except FileMistakes as error:
        raise click.UsageError(str(error)) from error


def _models(settings: Settings) -> tuple[ModelConfig, ...]:
    if settings.models is None:
        assert settings.backend is not None
        return (ModelConfig(None, (settings.backend,)),)
    try:
        return load_models(Path(settings.models).read_text(encoding="utf-8"), settings.models, os.environ)
    except OSError as error:
        raise click.UsageError(f"models: cannot read {settings.models}: {error.strerror}") from error
    except ValueError as error:  # FileMistakes, or text that is not UTF-8
        raise click.UsageError(str(error)) from error


def bind(settings: Settings) -> socket.socket:
    """The listening address, taken before anything slow happens; a socket that is bound does not accept yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named: asyncio sets TCP_NODELAY only then, and without it events wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise click.ClickException(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another with --port."
        ) from error
    return listener


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
