"""Prints docs/settings.md, made of the settings and flags themselves: `make reference` writes it, a test compares it.

Needs the engine's packages, because the engine's flags are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from backend.server.__main__ import main as engine
from gateway.cli import main
from gateway.cli.flags import CONFIG_FLAG, ENGINE_FLAGS, engine_variable, gateway_flags, parameters
from gateway.config_file import ENGINE_SECTION, SECTION
from gateway.settings import SETTINGS, SettingInfo

HEAD = f"""\
# Settings

<!-- Made by `make reference` out of the code; edit there. -->

Every setting can be given as a flag, as an environment variable, and in a configuration file. A flag wins over its
variable, that over the file. What is wrong is said before anything starts, with the flag, the variable, or the
file's line and key.

```yaml
# verbatim gateway --config verbatim.yaml, or VERBATIM_CONFIG=verbatim.yaml
version: 1
{SECTION}:
  port: 8042
  policy: policy.yaml
  log_format: json
{ENGINE_SECTION}:
  model: smollm2-135m-instruct
  threads: 2
```

`verbatim up` reads both sections, `verbatim gateway` and `verbatim backend engine` each its own one. Paths are
taken from the directory in which the command runs. Secrets (`redis`, which may hold a password) are better off in
the file or the environment than in flags, which others on the machine can see. What each tenant may do is not here
but in the [policy file](policies.md).
"""

ENGINE = f"""\
## Engine

Flags of `verbatim backend engine`, and of `verbatim up` and `verbatim demo` but for `--host`, `--port` and
`--log-format`, which they choose themselves. In the file they stand in the section `{ENGINE_SECTION}`.
`verbatim backend sglang` takes `--model-path`, `--verify-groups` and `--verify-window`; all its other flags are
SGLang's.
"""

VARIABLES = """\
## Other environment variables

| variable | |
|---|---|
| `VERBATIM_CONFIG` | the configuration file, as `--config` |
| `VERBATIM_SGLANG_PYTHON` | the Python of `verbatim backend sglang`, where SGLang has an environment of its own |
| `VERBATIM_VERIFY_SHAPE` | set by `verbatim backend sglang` for SGLang's processes; not to be set by hand |
| `OTEL_*` | OpenTelemetry's own, for `--traces otlp`; see [tracing](observability.md#traces) |
"""


SERVING = ("up", "gateway", "demo")
LISTED = {(name, one.opts[0]) for name, one in parameters([CONFIG_FLAG, *gateway_flags(), *ENGINE_FLAGS]).items()}
"""The flags that these commands share."""


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        "## Gateway\n\nFlags of `verbatim gateway`, and of `verbatim up` but for `--backend` and `--models`.\n",
    ]
    parts.append(_table(("setting", "flag", "variable", "value", "default", ""), map(_setting, SETTINGS.values())))
    parts.append(ENGINE)
    options = [one for one in engine.params if isinstance(one, click.Option)]
    parts.append(_table(("setting", "flag", "variable", "value", "default", ""), map(_engine, options)))
    parts.append(VARIABLES)
    parts.append("## Commands\n\nThe flags of each command beside those above.\n")
    parts.append(_table(("command", "flag", "variable", "value", "default", ""), _commands(main, ())))
    return "\n".join(parts)


def _setting(info: SettingInfo) -> Sequence[str]:
    flag = f"`{info.flag}`" if info.type is not bool else f"`{info.flag}`, `--no-{info.flag[2:]}`"
    kind = ", ".join(f"`{choice}`" for choice in info.choices) or _KINDS[info.type]
    default = "" if info.default is None else f"`{str(info.default).lower() if info.type is bool else info.default}`"
    return f"`{info.name}`", flag, f"`{info.variable}`", kind, default, info.said


_KINDS = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}


def _engine(option: click.Option) -> Sequence[str]:
    assert option.name is not None
    shown = option.show_default if isinstance(option.show_default, str) else str(option.default)
    flag, variable = f"`{option.opts[0]}`", f"`{engine_variable(option.name)}`"
    return f"`{option.name}`", flag, variable, _kind(option.type), f"`{shown}`", option.help or ""


def _kind(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        bounds = [f"at least {kind.min:g}"] if kind.min is not None else []
        bounds += [f"at most {kind.max:g}"] if kind.max is not None else []
        return " and ".join(bounds)
    return kind.name.replace("integer", "whole number")


def _commands(group: click.Group, path: Sequence[str]) -> Iterator[Sequence[str]]:
    for name, command in group.commands.items():
        here = (*path, name)
        listed = LISTED if name in SERVING else set()
        for option in command.params:
            if isinstance(option, click.Option) and (option.name, option.opts[0]) not in listed:
                yield _flag(" ".join(here), option)
        if isinstance(command, click.Group):
            yield from _commands(command, here)


def _flag(command: str, option: click.Option) -> Sequence[str]:
    given = isinstance(option.default, str | int | float) and option.default != "" and not option.is_flag
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    variable = f"`{option.envvar}`" if option.envvar else ""
    kind, default = "" if option.is_flag else _kind(option.type), f"`{option.default}`" if given else ""
    return f"`verbatim {command}`", flags, variable, kind, default, option.help or ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
