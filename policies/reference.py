"""The tables of docs/policies.md, made from the code that obeys them."""

from __future__ import annotations

from policies.explain import say
from policies.kinds import Flag, Kind, Limited, Number, Patterns, Whole, Word, Words
from policies.policy import PRECEDENCE
from policies.settings import KEYS


def precedence_table() -> str:
    """Who decides a setting, in Markdown."""
    rows = [f"| {place} | `{layer.name}` | {layer.whom} |" for place, layer in enumerate(PRECEDENCE, 1)]
    return "\n".join(["| | section | speaks of |", "|---|---|---|", *rows])


def settings_table() -> str:
    """Every setting, in Markdown."""
    rows = [f"| `{key.path}` | {_values(key.kind)} | `{say(key.built_in)}` | {key.doc} |" for key in KEYS]
    return "\n".join(["| setting | values | built in | |", "|---|---|---|---|", *rows])


def _values(kind: Kind[object]) -> str:
    match kind:
        case Word():
            return ", ".join(f"`{word}`" for word in kind.of)
        case Words():
            return "list of modes"
        case Flag():
            return "`true`, `false`"
        case Limited():
            return "1 or more, `unlimited`"
        case Whole():
            return "whole number"
        case Number():
            return f"{kind.least:g} to {kind.most:g}"
        case Patterns():
            return "list of names, `name*`"
    raise AssertionError(kind)
