"""Tool calls in a model's text: where they begin and end, the name, the arguments as they come.

Theory of operation. A reader gets text piece by piece and says what it was: content, the start of a call, arguments.

    outside ──marker──▶ between ──{──▶ head ──name and arguments' {──▶ arguments ──}──▶ tail ──}──▶ between
                          └──end──▶ outside

Arguments are handed on as the model writes them, up to the brace that balances the first; whether they are valid JSON
is for the client to see, as with OpenAI. A call written in another order (arguments first, further keys) is held back
until its object is complete. What begins like a call and is none is content, marker and all. White space beside calls
is nobody's content.

Owns the text held back. Its events are a function of the whole text alone: adjacent ones of a kind may be split at any
place, by how the text was cut into pieces. Knows no model's syntax (tool_formats.py) and nothing of OpenAI's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from gateway.text.stop_strings import overlap


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The index-th call of the answer begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call that has started."""

    index: int
    text: str


CallEvent: TypeAlias = Content | CallStart | CallArguments


class Reader(Protocol):
    """Takes text apart."""

    def push(self, text: str) -> list[CallEvent]: ...

    def finish(self) -> list[CallEvent]:
        """What was held back. Call once, after the last push."""
        ...


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a model writes calls.

    A block begins with `marker`, where there is one, and where the whole text begins with `bare`, also without. In it,
    `between` is skipped before calls, and `end` ends it where it stands instead of a call. `head` matches a call up to
    its arguments' opening brace, the name in its first group. A `wrapped` call is an object with a name and arguments;
    its name is a JSON string.
    """

    marker: str
    between: re.Pattern[str]
    head: re.Pattern[str]
    bare: str = ""
    end: str = ""
    wrapped: bool = True


class CallReader:
    """Reads one answer. Calls of other names than `names` are content, unless a marker introduces them."""

    def __init__(self, syntax: Syntax, names: Collection[str]) -> None:
        self._syntax = syntax
        self._names = names
        self._state = self._start if syntax.bare else self._outside
        self._held = ""
        self._lead = ""
        """What was consumed since the last event: content, if no call comes of it."""
        self._called = False
        """Whether the block has had a call."""
        self._marked = False
        self._braces = _Braces()
        self._calls = 0
        self._after_call = False

    def __repr__(self) -> str:
        return f"<CallReader {self._state.__name__.strip('_')} calls={self._calls} held={self._held!r}>"

    def push(self, text: str) -> list[CallEvent]:
        self._held += text
        events: list[CallEvent] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[CallEvent]:
        events: list[CallEvent] = []
        match self._state:
            case self._between | self._head:
                ends = self._called and self._syntax.end.startswith(self._rest())
                self._content(events, "" if ends else self._lead + self._held)
            case self._start | self._outside:
                self._content(events, self._held)
        self._held = self._lead = ""
        return events

    # Each state consumes what it can and says whether another look may find more.

    def _start(self, events: list[CallEvent]) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        if text.startswith(self._syntax.bare):
            self._state = self._between
        else:
            self._state = self._outside
        return True

    def _outside(self, events: list[CallEvent]) -> bool:
        held, marker = self._held, self._syntax.marker
        at = held.find(marker) if marker else -1
        if at >= 0:
            content = held[:at].rstrip()
            self._content(events, content)
            cut = at + len(marker)
            self._lead, self._held = held[len(content) : cut], held[cut:]
            self._marked, self._called = True, False
            self._state = self._between
            return True
        shown = held[: len(held) - overlap(held, marker)].rstrip()
        self._content(events, shown)
        self._held = held[len(shown) :]
        return False

    def _between(self, events: list[CallEvent]) -> bool:
        rest, end = self._rest(), self._syntax.end
        if self._called and end:
            if rest.startswith(end):
                self._held, self._lead = rest[len(end) :], ""
                self._state = self._outside
                return True
            if end.startswith(rest):
                return False
        if not rest:
            return False
        if self._syntax.wrapped and rest[0] != "{":
            return self._no_call(events)
        self._lead += self._held[: len(self._held) - len(rest)]
        self._held = rest
        self._braces = _Braces()
        self._state = self._head
        return True

    def _rest(self) -> str:
        skipped = self._syntax.between.match(self._held)
        return self._held[skipped.end() :] if skipped else self._held

    def _head(self, events: list[CallEvent]) -> bool:
        wrapped = self._syntax.wrapped
        if match := self._syntax.head.match(self._held):
            name = msgspec.json.decode(match[1], type=str) if wrapped else match[1]
            if not self._may_call(name):
                return self._no_call(events)
            self._open(events, name)
            self._held = self._held[match.end() :]
            self._braces = _Braces()
            self._state = self._arguments
            return True
        if not wrapped:
            return self._no_call(events) if "{" in self._held or "\n" in self._held else False
        end = self._braces.close(self._held)
        if end < 0:
            return False
        call = _read_call(self._held[:end])
        if call is None or not self._may_call(call[0]):
            return self._no_call(events)
        self._open(events, call[0])
        events.append(CallArguments(self._calls - 1, call[1]))
        self._held = self._held[end:]
        self._state = self._between
        return True

    def _arguments(self, events: list[CallEvent]) -> bool:
        end = self._braces.close(self._held)
        shown = self._held if end < 0 else self._held[:end]
        if shown:
            events.append(CallArguments(self._calls - 1, shown))
        self._held = self._held[len(shown) :]
        self._braces.forget(len(shown))
        if end < 0:
            return False
        self._braces = _Braces(depth=1)
        self._state = self._tail if self._syntax.wrapped else self._outside
        return True

    def _tail(self, events: list[CallEvent]) -> bool:
        # A model may forget the brace, but not what ends the block.
        ends = [self._braces.close(self._held), self._held.find(self._syntax.end) if self._syntax.end else -1]
        cut = min((end for end in ends if end >= 0), default=-1)
        if cut < 0:
            return False
        self._held = self._held[cut:]
        self._state = self._between
        return True

    def _may_call(self, name: str) -> bool:
        return self._marked or name in self._names

    def _open(self, events: list[CallEvent], name: str) -> None:
        events.append(CallStart(self._calls, name))
        self._calls += 1
        self._called = self._after_call = True
        self._lead = ""

    def _no_call(self, events: list[CallEvent]) -> bool:
        self._content(events, self._lead)
        self._lead = ""
        self._state = self._outside
        return True

    def _content(self, events: list[CallEvent], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            events.append(Content(text))


class WholeCall:
    """The whole text is the arguments of one call, whose name is known beforehand."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def __repr__(self) -> str:
        return f"<WholeCall {self._name}>"

    def push(self, text: str) -> list[CallEvent]:
        start: list[CallEvent] = [] if self._started else [CallStart(0, self._name)]
        self._started = True
        return [*start, CallArguments(0, text)] if text else start

    def finish(self) -> list[CallEvent]:
        return [] if self._started else self.push("")


class _Braces:
    """Finds the brace that closes the first one of a growing text, strings apart."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._seen = 0
        self._in_string = False
        self._escaped = False

    def close(self, text: str) -> int:
        """Where the text behind the closing brace begins, or -1. Looks at each character once."""
        for at in range(self._seen, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._seen = at + 1
                    return self._seen
        self._seen = len(text)
        return -1

    def forget(self, count: int) -> None:
        """The first `count` characters are gone."""
        self._seen -= count


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    parameters: msgspec.Raw = msgspec.Raw(b"null")


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's object, None where it is none. Arguments written as a string are its text."""
    try:
        call = msgspec.json.decode(text, type=_Call)
        for raw in (call.arguments, call.parameters):
            written = bytes(raw).decode()
            if written != "null":
                return call.name, msgspec.json.decode(written, type=str) if written.startswith('"') else written
        return call.name, "{}"
    except (msgspec.DecodeError, RecursionError):
        return None
