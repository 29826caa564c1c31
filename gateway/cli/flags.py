"""The flags that several commands share, and the way back from values to flags for the processes that they start.

The gateway's flags are made of its settings. The engine owns its own ones, with their defaults and ranges; they are
said again here, where it cannot be imported, and a test compares the two.

A flag that is not given is None and is not passed on: each default has one owner, and is only shown here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.config_file import ConfigFile, read_config
from gateway.settings import ENV_PREFIX, SETTINGS, SettingInfo
from policies.sections import FileMistakes, Plain

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]

ENGINE_PREFIX = f"{ENV_PREFIX}ENGINE_"
DEFAULT_MODEL = "smollm2-135m-instruct"


def _engine_flag(name: str, shown: str, **more: Any) -> Option:
    return click.option(name, show_default=shown, envvar=engine_variable(name.removeprefix("--")), **more)


def engine_variable(name: str) -> str:
    """The environment variable of one of the engine's flags."""
    return ENGINE_PREFIX + name.replace("-", "_").upper()


ENGINE_FLAGS = [
    _engine_flag("--model", DEFAULT_MODEL, help="GGUF file or Hugging Face folder."),
    _engine_flag("--device", "cpu", type=click.Choice(["cpu", "cuda"]), help="Where it computes."),
    _engine_flag("--dtype", "bfloat16", type=click.Choice(["float32", "bfloat16"]), help="Of weights and arithmetic."),
    _engine_flag("--threads", "1", type=click.IntRange(1), help="Threads of the engine."),
    _engine_flag("--kv-bytes", "1073741824", type=click.IntRange(1), help="Memory for the KV cache."),
    _engine_flag("--verify-groups", "8", type=click.IntRange(1), help="Requests in one verification pass."),
    _engine_flag(
        "--verify-window",
        "32, or 64 with cuda",
        type=click.IntRange(2),
        help="Rows of each request in one verification pass.",
    ),
]
ENGINE_ALONE = [
    click.option("--host"),
    click.option("--port", type=click.IntRange(0, 65535)),
    click.option("--log-format", type=click.Choice(["text", "json"])),
]
"""Flags of an engine that is started by itself; `verbatim up` chooses these for its engine."""


def gateway_flags(*but: str) -> list[Option]:
    """A flag for each setting of the gateway that is not named."""
    return [_gateway_flag(info) for info in SETTINGS.values() if info.name not in but]


def _gateway_flag(info: SettingInfo) -> Option:
    shown = info.said
    if info.type is not bool and info.default is not None:
        shown += f"  [default: {info.default}]"
    if info.type is bool:
        return click.option(f"{info.flag}/--no-{info.flag.removeprefix('--')}", default=None, help=shown)
    return click.option(info.flag, type=click.Choice(info.choices) if info.choices else info.type, help=shown)


def flags(options: Sequence[Option]) -> Callable[[Command], Command]:
    """A decorator that gives a command all of them, in order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def parameters(options: Sequence[Option]) -> dict[str, click.Parameter]:
    """The options by the names of their values."""
    probe = click.Command(None)
    for option in options:
        option(probe)
    return {parameter.name: parameter for parameter in probe.params if parameter.name is not None}


def _load(context: click.Context, parameter: click.Parameter, path: Path | None) -> ConfigFile:
    if path is None:
        return ConfigFile()
    try:
        file = load_config(path)
    except OSError as error:
        raise click.UsageError(f"--config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # FileMistakes, or text that is not UTF-8
        raise click.UsageError(str(error) if isinstance(error, FileMistakes) else f"{path}: is not UTF-8") from error
    # What click takes where neither a flag nor its variable is given.
    context.default_map = {name: file.engine[name] for name in parameters(ENGINE_FLAGS) if name in file.engine}
    return file


def load_config(path: Path) -> ConfigFile:
    """A configuration file; raises `FileMistakes`, `OSError` or `UnicodeDecodeError`."""
    engine = {name: _convert(one) for name, one in parameters([*ENGINE_FLAGS, *ENGINE_ALONE]).items()}
    return read_config(path.read_text(encoding="utf-8"), str(path), engine)


def _convert(parameter: click.Parameter) -> Callable[[Plain], object]:
    def convert(value: Plain) -> object:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError("must be text or a number")
        try:
            return parameter.type.convert(value, None, None)
        except click.BadParameter as error:
            raise ValueError(error.message) from None

    return convert


CONFIG_FLAG = click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="VERBATIM_CONFIG",
    is_eager=True,
    callback=_load,
    help="YAML file of settings, each under its name; flags and environment variables win over it.",
)


def gateway_argv(values: Mapping[str, Any]) -> list[str]:
    """The values of the gateway's flags as flags."""
    given = {name: value for name, value in values.items() if value is not None}
    argv = argv_of({name: value for name, value in given.items() if not isinstance(value, bool)})
    words = [(name.replace("_", "-"), value) for name, value in given.items() if isinstance(value, bool)]
    return [*argv, *(f"--{word}" if value else f"--no-{word}" for word, value in words)]


def argv_of(values: Mapping[str, Any]) -> list[str]:
    """Values as flags, those that are None left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), str(value))]


def engine_environment(file: ConfigFile) -> dict[str, str]:
    """This process's environment with what the file says to an engine, where no variable says it already."""
    return {engine_variable(name): str(value) for name, value in file.engine.items()} | os.environ
