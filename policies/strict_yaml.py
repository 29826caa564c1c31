"""YAML without its surprises: text in, a tree of values with line numbers out.

Owns the dialect, a subset of YAML 1.2: mappings with distinct text keys, sequences, and scalars that are null, a
boolean (`true`, `false`), a number or text. `off`, `no` and dates are text. Anchors, aliases and tags are refused, so a
document is no larger than its text says. Knows nothing of what the values mean.

Errors give the line and what is wrong, never the text around it: that may be a secret.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

MAX_CHARS = 16 * 1024 * 1024
MAX_DEPTH = 16

Scalar: TypeAlias = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,20}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class YamlError(ValueError):
    """The text is not YAML as it is accepted here; `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Node:
    """A value and the line it begins on. `key_lines` says where the keys of a mapping stand."""

    value: Scalar | list[Node] | dict[str, Node]
    line: int
    key_lines: dict[str, int] | None = None


def parse_yaml(text: str) -> Node:
    """The one document in `text`, null for an empty one; raises `YamlError`."""
    if len(text) > MAX_CHARS:
        raise YamlError(f"the document is longer than {MAX_CHARS} characters", 1)
    events = _events(text)
    next(events)  # the start of the stream
    if isinstance(event := next(events), StreamEndEvent):
        return Node(None, 1)
    assert isinstance(event, DocumentStartEvent)
    root = _node(next(events), events, 1)
    next(events)  # the end of the document
    if not isinstance(event := next(events), StreamEndEvent):
        raise YamlError("a second document begins; only one is read", _line(event))
    return root


def _events(text: str) -> Iterator[Event]:
    try:
        yield from yaml.parse(text, Loader=yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"not YAML: {error.problem or error.context}", 1 if mark is None else mark.line + 1) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise YamlError(f"not YAML: {type(error).__name__}", 1) from None


def _node(event: Event, events: Iterator[Event], depth: int) -> Node:
    line = _line(event)
    if isinstance(event, AliasEvent):
        raise YamlError("aliases are not supported; write the value out", line)
    assert isinstance(event, NodeEvent)
    if event.anchor is not None:
        raise YamlError("anchors are not supported; write the value out where it is needed", line)
    if depth > MAX_DEPTH:
        raise YamlError(f"nested deeper than {MAX_DEPTH} levels", line)
    if isinstance(event, ScalarEvent):
        _refuse_tag(event.tag, line)
        return Node(_scalar(event.value) if event.implicit[0] else event.value, line)
    assert isinstance(event, MappingStartEvent | SequenceStartEvent)
    _refuse_tag(event.tag, line)
    if isinstance(event, SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), SequenceEndEvent):
            items.append(_node(item, events, depth + 1))
        return Node(items, line)
    return _mapping(events, line, depth)


def _mapping(events: Iterator[Event], line: int, depth: int) -> Node:
    values: dict[str, Node] = {}
    lines: dict[str, int] = {}
    while not isinstance(key := next(events), MappingEndEvent):
        if not isinstance(key, ScalarEvent) or key.anchor is not None or key.tag is not None:
            raise YamlError("a key must be plain text", _line(key))
        name = key.value
        if name in values:
            raise YamlError(f"the key {name!r} stands twice, first on line {lines[name]}", _line(key))
        lines[name] = _line(key)
        values[name] = _node(next(events), events, depth + 1)
    return Node(values, line, lines)


def _scalar(text: str) -> Scalar:
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


def _refuse_tag(tag: str | None, line: int) -> None:
    if tag is not None:
        raise YamlError("tags are not supported", line)


def _line(event: Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1
