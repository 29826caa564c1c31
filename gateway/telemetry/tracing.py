"""Spans as the gateway's parts see them, and the one that does nothing: tracing is off unless the settings ask for it.

Parents are named, not ambient: a span may end in another task than it began in, or not be the innermost one. The record
of a request holds its span (record.py), whose children the parts begin. No prompt, no answer and no key is in a span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str]]


class Span(Protocol):
    """Something that takes time. As a context it ends itself, with the error that left it."""

    @property
    def recording(self) -> bool:
        """Whether anybody will see it; where not, attributes need not be gathered."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells whoever is called that they are called inside of it (W3C Trace Context)."""
        ...

    def child(self, name: str, attributes: Attributes | None = None, *, calls: bool = False) -> Span:
        """A span inside of this one; one that `calls` is a call to another process."""
        ...

    def rename(self, name: str) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def end(self, error: str = "") -> None:
        """It is over; `error` is what went wrong, in a word."""
        ...

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracing(Protocol):
    """Where spans begin that are inside of no other one here."""

    def request(self, headers: Mapping[str, str]) -> Span:
        """The span of a request, inside of the one that its headers tell of, where they do."""
        ...


class NoSpan:
    """Nobody will see it."""

    recording = False
    headers: Mapping[str, str] = {}  # nobody writes to it

    def __repr__(self) -> str:
        return "<NoSpan>"

    def child(self, name: str, attributes: Attributes | None = None, *, calls: bool = False) -> NoSpan:
        return self

    def rename(self, name: str) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, error: str = "") -> None:
        pass

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NO_SPAN = NoSpan()


class NoTracing:
    """Tracing that is off."""

    def request(self, headers: Mapping[str, str]) -> Span:
        return NO_SPAN


NO_TRACING = NoTracing()
