"""A grammar of the protocol as source for llguidance, and the checks that its own limits leave open.

Owns three decisions. Tokens are never forced: where the grammar leaves one way to go on, every way to spell it in
tokens is open, so that what is allowed depends on bytes alone, and takes no time that grows with the forced text. White
space in JSON is free but bounded in each place, since small models at times go on with it for ever. What a schema asks
for beyond what the library can hold a text to is refused, never ignored.

In doubt: the library ignores keywords that JSON Schema does not know, as JSON Schema says. It gives a number its
`multipleOf` by an automaton of as many states, without a limit of its own (1.9.1); hence the bound here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal

from llguidance import regex_to_lark

from backend.protocol import Grammar

GRAMMAR_FIELD = "sampling.grammar"
"""What calls name it."""

MAX_WHITE_SPACE = 32
MAX_MULTIPLE = 100_000

_OPTIONS = '%llguidance {"no_forcing": true}\n'
_LIBRARY_KEY = "x-guidance"


class GrammarError(Exception):
    """A grammar cannot be served; the message says why."""


def lark_source(grammar: Grammar) -> str:
    """The grammar in llguidance's dialect of Lark. Raises GrammarError for what can be told without compiling it."""
    if grammar.kind == "regex":
        # The class escapes such as \d keep their meaning for Unicode.
        return f"{_OPTIONS}start: /{regex_to_lark(grammar.text, use_ascii='')}/"
    schema = _read_schema(grammar.text)
    options = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITE_SPACE}}}"}
    return f"{_OPTIONS}start: %json {json.dumps(schema | {_LIBRARY_KEY: options})}"


def _read_schema(text: str) -> dict[str, object]:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    except ValueError as error:
        raise GrammarError("the schema holds an integer of too many digits") from error
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be a JSON object")
    if _LIBRARY_KEY in schema:
        raise GrammarError(f"the keyword {_LIBRARY_KEY} is not supported")
    _check_multiples(schema)
    return schema


def _refuse_constant(name: str) -> float:
    raise GrammarError(f"the schema is not JSON: {name} is no number")


def _check_multiples(schema: dict[str, object]) -> None:
    """Bound the least common multiple of every `multipleOf`, counted in units of the last decimal place."""
    multiples = [Decimal(str(value)) for value in _values_of("multipleOf", schema)]
    bounded = all(0 < multiple < 2**32 for multiple in multiples)  # An infinity has no exponent.
    places = max((max(0, -int(multiple.as_tuple().exponent)) for multiple in multiples if bounded), default=0)
    if not bounded or places > 20:
        raise GrammarError("multipleOf must be above 0 and below 4294967296, with at most 20 decimal places")
    common = math.lcm(*(int(multiple.scaleb(places)) for multiple in multiples))
    while places and common % 10 == 0:
        common, places = common // 10, places - 1
    if common > MAX_MULTIPLE:
        raise GrammarError(
            f"the least common multiple of all multipleOf must be at most {MAX_MULTIPLE}, in units of the last decimal"
            f" place; it is {common}"
        )


def _values_of(keyword: str, schema: object) -> Iterator[int | float]:
    """The numbers that stand under a keyword anywhere in a schema."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            value = part.get(keyword)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value
            pending += part.values()
        elif isinstance(part, list):
            pending += part
