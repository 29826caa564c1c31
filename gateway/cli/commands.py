"""The commands. What they do lives elsewhere: serving in app.py, supervising in up.py; so do the flags they share."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvloop
from click.shell_completion import get_completion_class

from gateway.app import serve
from gateway.cli.admin import admin
from gateway.cli.demo import PROMPTS, Plan, run_demo
from gateway.cli.flags import (
    CONFIG_FLAG,
    DEFAULT_MODEL,
    ENGINE_FLAGS,
    argv_of,
    engine_environment,
    flags,
    gateway_argv,
    gateway_flags,
    parameters,
)
from gateway.cli.installed import require
from gateway.cli.policy import keys, policy
from gateway.cli.receipts import receipts, replay
from gateway.cli.up import BACKEND_COMMANDS, run_up
from gateway.config_file import ConfigFile, read_settings
from gateway.errors import ConfigError, GatewayError
from gateway.models_file import ModelConfig, load_models
from gateway.receipts.key_files import KeyFileError, KeyFolder
from gateway.settings import Settings
from gateway.telemetry.logs import configure_logs
from policies.document import DEFAULT_POLICY, FixedPolicy
from policies.policy_file import PolicyFile, Unfit
from policies.sections import FileMistakes

BACKEND_FLAG = click.option(
    "--backend",
    "kind",
    default="engine",
    show_default=True,
    type=click.Choice(list(BACKEND_COMMANDS)),
    help="The embedded engine, or a stock SGLang (see docs/sglang.md).",
)


_EXAMPLES = {
    "main": """
\b
Examples:
  verbatim up                             an engine with a small model, and a gateway
  verbatim demo                           see what differs under load, and what does not
  verbatim keys new                       an API key, and the hash of it for the policy file
  verbatim COMMAND --help                 flags, and examples of a command
""",
    "up": """
\b
Examples:
  verbatim up --model ./Qwen3-0.6B --dtype float32 --port 8042
  verbatim up --policy policy.yaml --redis redis://127.0.0.1:6379/0
  verbatim up --config verbatim.yaml      flags win over the file
  VERBATIM_PORT=9000 verbatim up          each flag is also a variable: docs/settings.md
""",
    "demo": """
\b
Examples:
  verbatim demo
  verbatim demo --url http://127.0.0.1:8042 --loads 1,64 --json figures.json
""",
    "gateway": """
\b
Examples:
  verbatim gateway --backend http://127.0.0.1:8043
  verbatim gateway --models models.yaml --policy policy.yaml --log-format json
  verbatim gateway --config verbatim.yaml
""",
}


@click.group(epilog=_EXAMPLES["main"])
@click.version_option(package_name="verbatim", prog_name="verbatim")
def main() -> None:
    """An OpenAI-compatible gateway that makes LLM inference reproducible, bit for bit."""


@main.command(epilog=_EXAMPLES["up"])
@CONFIG_FLAG
@BACKEND_FLAG
@flags(gateway_flags("backend", "models"))
@flags(ENGINE_FLAGS)
def up(file: ConfigFile, kind: str, **values: Any) -> None:
    """Start an engine and a gateway on this machine, and stop both with Ctrl-C."""
    engine_values = {name: values.pop(name) for name in parameters(ENGINE_FLAGS)}
    require(kind, BACKEND_COMMANDS[kind][0])
    # The backend's address is ours to choose; the settings are read here too so that a mistake shows before any start.
    settings = _settings({**values, "backend": f"http://127.0.0.1:{_free_port()}"}, file)
    if settings.port == 0:
        values["port"] = _free_port()  # known before the gateway is asked whether it answers
        settings = replace(settings, port=values["port"])
    _policies(settings, _receipt_keys(settings))
    bind(settings).close()
    config = ["--config", file.name] if file.name else []
    argv = [*config, *gateway_argv(values)]
    backend_argv = _backend_argv(kind, engine_values)
    if kind == "engine":
        backend_argv += ["--log-format", settings.log_format]
    code = asyncio.run(run_up(settings, backend_argv, argv, BACKEND_COMMANDS[kind]))
    sys.exit(code)


@main.command(epilog=_EXAMPLES["demo"])
@click.option("--url", help="Base URL of a running Verbatim; without it the demo starts one of its own.")
@click.option("--api-key", envvar="VERBATIM_API_KEY", help="For a Verbatim whose policy asks for one.")
@click.option("--prompts", default=8, show_default=True, type=click.IntRange(1, len(PROMPTS)), help="Questions to ask.")
@click.option(
    "--loads", default="1,8,16,32", show_default=True, help="Numbers of requests in flight, one after the other."
)
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each answer.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 2), help="Of all requests.")
@click.option("--seed", default=42, show_default=True, help="Of all requests.")
@click.option(
    "--json", "report", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here as JSON."
)
@BACKEND_FLAG
@flags(ENGINE_FLAGS)
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
    **engine_values: Any,
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
    if report is not None and not report.parent.is_dir():
        raise click.BadParameter(f"there is no directory {report.parent}", param_hint="--json")
    plan = Plan(prompts=prompts, loads=in_flight, tokens=tokens, temperature=temperature, seed=seed)
    _backend_argv(kind, engine_values)
    if url is None:
        require(kind, BACKEND_COMMANDS[kind][0])
    sys.exit(
        run_demo(
            plan, url, api_key, ["--backend", kind, "--no-access-log", *argv_of(engine_values)], _free_port(), report
        )
    )


@main.command(epilog=_EXAMPLES["gateway"])
@CONFIG_FLAG
@flags(gateway_flags())
def gateway(file: ConfigFile, **values: Any) -> None:
    """Serve the OpenAI API in front of a backend that is already running."""
    settings = _settings(values, file)
    configure_logs(settings.log_format, settings.log_level)
    models, receipt_keys = _models(settings), _receipt_keys(settings)
    policies = _policies(settings, receipt_keys)
    with bind(settings) as listener:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(settings, models, policies, receipt_keys, listener, _announce))
        except GatewayError as error:
            raise click.ClickException(error.message) from error


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands and flags.

    \b
    bash:  eval "$(verbatim completion bash)"          in ~/.bashrc
    zsh:   eval "$(verbatim completion zsh)"           in ~/.zshrc
    fish:  verbatim completion fish > ~/.config/fish/completions/verbatim.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "verbatim", "_VERBATIM_COMPLETE").source())


main.add_command(admin)
main.add_command(policy)
main.add_command(keys)
main.add_command(receipts)
main.add_command(replay)


@main.group()
def backend() -> None:
    """Start one kind of backend alone."""


@backend.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@CONFIG_FLAG
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(file: ConfigFile, arguments: tuple[str, ...]) -> None:
    """The embedded engine; all flags but --config are its own."""
    _become("engine", arguments, engine_environment(file))


@backend.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sglang(arguments: tuple[str, ...]) -> None:
    """A stock SGLang server; besides --model-path and --verify-..., all flags are SGLang's own."""
    _become("sglang", arguments, os.environ)


def _become(kind: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    command = BACKEND_COMMANDS[kind]
    require(kind, command[0])
    os.execve(command[0], [*command, *arguments], environment)


def _backend_argv(kind: str, flags: dict[str, Any]) -> list[str]:
    """The engine's flags as the backend of this kind calls them."""
    if kind == "engine":
        return argv_of(flags)
    for name in ("threads", "kv_bytes"):
        if flags[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is a flag of the engine, not of {kind}")
    model = flags["model"] or DEFAULT_MODEL
    return ["--model-path", model, "--log-level", "warning", *argv_of({**flags, "model": None})]


def _settings(values: dict[str, Any], file: ConfigFile) -> Settings:
    try:
        return read_settings(values, os.environ, file)
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
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another with --host or --port."
        ) from error
    return listener


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
