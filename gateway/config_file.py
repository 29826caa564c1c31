"""Reads the settings from wherever they are given: flags, environment, and a configuration file.

    version: 1
    gateway:                      # each setting by its name, with underscores
      port: 8042
      policy: /etc/verbatim/policy.yaml
    engine:                       # the flags of the embedded engine, likewise
      model: /models/smollm2

A flag wins over its environment variable, that over the file. An error names the flag, the variable or the key of the
file that is at fault. Paths in the file are taken as they are, from the directory in which the command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.errors import ConfigError
from gateway.settings import ENV_PREFIX, SETTINGS, SettingInfo, Settings
from policies.kinds import Flag, Name, Whole
from policies.sections import Mistakes, Plain, Section, open_document

VERSION = 1
SECTION = "gateway"
ENGINE_SECTION = "engine"
_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says: settings of the gateway by name, and flags of the engine. `name` is what errors call it."""

    name: str = ""
    gateway: Mapping[str, object] = field(default_factory=dict, repr=False)
    engine: Mapping[str, object] = field(default_factory=dict)


Parser: TypeAlias = Callable[[Plain], object]
"""Takes a plain value of the file; raises `ValueError` saying what it must be."""


def read_config(text: str, name: str, engine: Mapping[str, Parser]) -> ConfigFile:
    """A file's text, read. `engine` are the keys that its section for the engine may hold.

    Raises `FileMistakes` with all mistakes.
    """
    mistakes = Mistakes(name)
    root = open_document(text, mistakes)
    root.require("version", Whole(VERSION, VERSION).parse)
    gateway = _values(root.section(SECTION), {info.name: _parser(info) for info in SETTINGS.values()})
    engine_values = _values(root.section(ENGINE_SECTION), engine)
    root.close()
    mistakes.raise_any()
    return ConfigFile(name, gateway, engine_values)


def read_settings(flags: Mapping[str, object], env: Mapping[str, str], file: ConfigFile | None = None) -> Settings:
    """Settings from flags (None where not given), environment and file; raises `ConfigError` naming what is wrong."""
    file = file or ConfigFile()
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for name, info in SETTINGS.items():
        if (flag := flags.get(name)) is not None:
            values[name], sources[name] = flag, info.flag
        elif info.variable in env:
            values[name], sources[name] = _from_text(env[info.variable], info), info.variable
        elif name in file.gateway:
            values[name], sources[name] = file.gateway[name], f"{file.name}: {SECTION}.{name}"
    if "backend" not in values and "models" not in values:
        raise ConfigError(
            "no backend: give --backend URL or --models FILE, or set"
            f" {ENV_PREFIX}BACKEND or {ENV_PREFIX}MODELS, or either in the file of --config",
            param="backend",
        )
    try:
        return Settings(**values)  # type: ignore[arg-type]  # checked one by one above and in __post_init__
    except ConfigError as error:
        source = sources.get(error.param or "", error.param)
        raise ConfigError(f"{source}: {error.message}", param=error.param) from error


def _values(section: Section | None, parsers: Mapping[str, Parser]) -> dict[str, object]:
    if section is None:
        return {}
    taken = {name: section.take(name, parse) for name, parse in parsers.items()}
    section.close()
    return {name: value for name, value in taken.items() if value is not None}


def _parser(info: SettingInfo) -> Parser:
    def parse(value: Plain) -> object:
        if info.choices and value not in info.choices:
            raise ValueError(f"must be one of {', '.join(info.choices)}")
        if info.type is bool:
            return Flag().parse(value)
        if info.type is int:
            return Whole(0).parse(value)
        if info.type is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
            raise ValueError("must be a number")
        return Name().parse(value)

    return parse


def _from_text(text: str, info: SettingInfo) -> object:
    if info.choices and text not in info.choices:
        raise ConfigError(f"{info.variable}: must be one of {', '.join(info.choices)}", param=info.name)
    if info.type is bool:
        if text.lower() not in _WORDS:
            raise ConfigError(f"{info.variable}: {text!r} is neither true nor false", param=info.name)
        return _WORDS[text.lower()]
    if info.type is str:
        return text
    try:
        return info.type(text)
    except ValueError:
        kind = "whole number" if info.type is int else "number"
        raise ConfigError(f"{info.variable}: {text!r} is no {kind}", param=info.name) from None
