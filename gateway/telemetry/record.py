"""One request as telemetry sees it, filled in by whoever serves it and looked at when it has ended.

The record of the request being served is ambient (`recording`): noting something must not change a signature, and no
answer depends on what is noted. A task begun for a request notes in that request's record, also where the task
outlives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter

from gateway.errors import GatewayError, Overloaded
from gateway.telemetry.tracing import NO_SPAN, Span

REQUEST_ID = "x-request-id"


@dataclass(slots=True, eq=False)
class Record:
    """What is known so far; empty where nothing is. Names are only those that configuration holds.

    Times are seconds of `perf_counter`. `code` is the error's, `reason` what refused a request for want of room. `via`
    says who answers: "backend" or "upstream". `events` are those of a stream that is handed on. `longest` counts the
    tokens of the longest choice. `body` is what the client sent, where that is to be kept; `path` what it asked for,
    where that is no route of ours.
    """

    request_id: str = ""
    method: str = ""
    route: str = ""
    path: str = ""
    began: float = 0.0
    ended: float = 0.0
    tenant: str = ""
    model: str = ""
    mode: str = ""
    via: str = ""
    stream: bool = False
    status: int = 0
    code: str = ""
    reason: str = ""
    cache: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest: int = 0
    events: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    waited_s: float = 0.0
    calls: int = 0
    span: Span = NO_SPAN
    keeps_body: bool = False
    body: bytes | None = None
    _waits: int = 0
    _waiting_since: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.ended - self.began

    @property
    def own_s(self) -> float | None:
        """The time in which nobody else was waited for; None while somebody is, or where nobody was."""
        return None if self._waits or not self.calls else self.duration_s - self.waited_s

    def headers(self, span: Span) -> dict[str, str]:
        """What a call made for the request, within a span of its, says of it."""
        return {REQUEST_ID: self.request_id, **span.headers} if self.request_id else {}

    def wait(self) -> None:
        """From now on somebody else is waited for: a backend, an upstream, the rest of the body."""
        if not self._waits:
            self._waiting_since = perf_counter()
        self._waits += 1

    def go_on(self) -> None:
        """One of those has answered."""
        self._waits -= 1
        if not self._waits:
            self.waited_s += perf_counter() - self._waiting_since

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.wait()
        try:
            yield
        finally:
            self.go_on()

    def read(self, body: bytes) -> None:
        """The whole body is there."""
        if self.keeps_body:
            self.body = body

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Waiting for the answer of a call."""
        self.call()
        try:
            yield
        finally:
            self.go_on()

    def call(self) -> None:
        """A backend or an upstream is called, and waited for."""
        self.calls += 1
        self.wait()

    def piece(self, content: bytes) -> None:
        """Waiting ended with a piece of a stream of events."""
        self.go_on()
        self.came()
        self.events += content.count(b"\n\n")

    def came(self) -> None:
        """Tokens are there to be sent."""
        self.last_at = perf_counter()
        if self.first_at is None:
            self.first_at = self.last_at

    def finish_choice(self, tokens: int) -> None:
        """A choice is complete."""
        self.completion_tokens += tokens
        self.longest = max(self.longest, tokens)

    def fail(self, code: str, reason: str = "") -> None:
        """Something went wrong; what went wrong first counts."""
        if not self.code:
            self.code, self.reason = code, reason

    def fail_with(self, error: GatewayError) -> None:
        """An error of the gateway's own tree went to the client."""
        self.fail(error.code or error.type, error.reason if isinstance(error, Overloaded) else "")


_CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)


def recording() -> Record:
    """The record of the request being served. Outside of one, what is noted is lost."""
    return _CURRENT.get() or Record()


def begin_recording(record: Record) -> None:
    """From now on what is noted in this task, and in those that it begins, is noted in `record`.

    For good: what the server says of a request behind its end, an exception say, belongs to it too.
    """
    _CURRENT.set(record)
