"""A request body: from bytes to typed fields, with an error that names the field at fault.

Owns what holds for every endpoint: the body is a JSON object, null means absent, nothing is nested without bound, and
what the endpoint does not list is refused by name: a field silently dropped is an answer silently changed. Knows no
endpoint's fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec

from gateway.errors import RequestError

MAX_NESTING = 8
"""How deep we look into a field. The deepest one understood, `messages[0].tool_calls[0].function.name`, is 6 deep."""

MAX_FREE_NESTING = 64
"""How deep JSON of the client's own may be, such as the schema of a tool."""

VIEWS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Say something about the request, nothing about the answer: accepted everywhere and not looked at."""

MISSING = "missing_required_parameter"
"""OpenAI's code for a field that is not there."""

Object: TypeAlias = dict[str, object]
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Rules:
    """What an endpoint says of some of its fields.

    Known and not supported are the `neutral` ones, but for the values that change nothing, and the `refused` ones.
    The `free` ones hold JSON of the client's own, in which null is a value.
    """

    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()


def read_body(content: bytes, rules: Rules) -> Object:
    """The fields of a body that say something about the answer; raises `RequestError`."""
    return _known_fields(_decode(content), rules)


def take(fields: Object, type_: type[T]) -> T:
    """Remove the fields of `type_` and return them as one; raises `RequestError`."""
    return _convert({name: fields.pop(name) for name in type_.__struct_fields__ if name in fields}, type_)


def take_rest(fields: Object, type_: type[T]) -> T:
    """The remaining fields as a `type_`, which must know them all; raises `RequestError`."""
    return _convert(fields, type_)


def check_nesting(value: object, field: str, depth: int = 1) -> None:
    """Raise `RequestError` for JSON of the client's own that is nested deeper than other code can follow."""
    if not isinstance(value, dict | list):
        return
    if depth > MAX_FREE_NESTING:
        raise RequestError(f"{field} is nested too deeply", param=field)
    for item in value.values() if isinstance(value, dict) else value:
        check_nesting(item, field, depth + 1)


def _decode(content: bytes) -> Object:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise _field_that_is_no_json(content) or RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _field_that_is_no_json(content: bytes) -> RequestError | None:
    """The field at fault where Python's json module reads what is no JSON: NaN, an infinity, half a character."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    for path, leaf in _leaves(body, "", 0):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return RequestError(f"{path} must be a finite number", param=path)
        if isinstance(leaf, str) and not _is_text(leaf):
            return RequestError(f"{path} holds a lone surrogate, which is no character", param=path)
    return None


def _leaves(value: object, path: str, depth: int) -> Iterator[tuple[str, object]]:
    """Numbers, strings and the like with their paths, as far down as we look and as the path can be written."""
    if depth > MAX_NESTING:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if _is_text(key):
                yield from _leaves(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", depth + 1)
    else:
        yield path, value


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _known_fields(body: Object, rules: Rules) -> Object:
    """The fields that say something about the answer, without those that are null."""
    kept: Object = {}
    for name, value in body.items():
        if value is None or name in VIEWS:
            continue
        neutral = rules.neutral.get(name)
        if name in rules.refused:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
        if neutral is not None and not _is_neutral(value, neutral):
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_value")
        if name in rules.free:
            check_nesting(value, name)
            kept[name] = value
        elif neutral is None:
            kept[name] = _without_nulls(value, name, 1)
    return kept


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # `==` takes 1 for True; parallel_tool_calls of 1 is no neutral value.
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def _without_nulls(value: object, field: str, depth: int) -> object:
    if not isinstance(value, dict | list):
        return value
    # What msgspec decodes may be nested deeper than Python can follow.
    if depth > MAX_NESTING:
        raise RequestError(f"{field} is nested too deeply", param=field)
    if isinstance(value, dict):
        return {k: _without_nulls(v, field, depth + 1) for k, v in value.items() if v is not None}
    return [_without_nulls(item, field, depth + 1) for item in value]


_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_WHOLE_FIELD = (
    (re.compile(r"^Object missing required field `(.*)`$"), "is required", MISSING),
    (
        re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL),
        "is unknown or not supported",
        "unknown_parameter",
    ),
)
_WRONG_TYPE = re.compile(r"^Expected `[^`]*`, got ")


def _convert(body: Object, type_: type[T]) -> T:
    try:
        return msgspec.convert(body, type_)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        assert match is not None
        # What is wrong with a value under a key of the client's is said of the whole field.
        reason, path = match["reason"], (match["path"] or "").partition("[...]")[0]
        code = "invalid_type" if path and _WRONG_TYPE.match(reason) else None
        for pattern, said, its_code in _WHOLE_FIELD:
            if at := pattern.match(reason):
                path, reason, code = f"{path}.{at[1]}" if path else at[1], said, its_code
        raise RequestError(f"{path}: {reason}" if path else reason, param=path or None, code=code) from error
