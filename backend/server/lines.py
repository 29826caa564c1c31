"""Calls whose tokens are sent as they come: one line of JSON for each event (`application/x-ndjson`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask, Scored
from backend.protocol import DecodeEvent, ErrorDetail, StreamEvent, StreamToken, VerifiedToken
from backend.server.calls import stream
from backend.server.errors import CallError
from backend.server.http import unless_gone


class Lines(Protocol):
    """How a call that streams writes what happens to its task."""

    def tokens(self, tokens: Sequence[Scored]) -> msgspec.Struct: ...

    def end(self, task: DecodeTask) -> msgspec.Struct: ...

    def error(self, detail: ErrorDetail) -> msgspec.Struct: ...


class StreamLines:
    """Lines of `StreamEvent`."""

    def tokens(self, tokens: Sequence[Scored]) -> StreamEvent:
        return StreamEvent(tokens=[StreamToken(id=t.id, logprob=t.logprob, top=t.top) for t in tokens])

    def end(self, task: DecodeTask) -> StreamEvent:
        return StreamEvent(finish=task.finish or "length")

    def error(self, detail: ErrorDetail) -> StreamEvent:
        return StreamEvent(error=detail)


class DecodeLines:
    """Lines of `DecodeEvent`."""

    def __init__(self, fingerprint: str):
        self._fingerprint = fingerprint

    def tokens(self, tokens: Sequence[Scored]) -> DecodeEvent:
        verified = [VerifiedToken(id=t.id, logprob=t.logprob, top=t.top) for t in tokens]
        return DecodeEvent(self._fingerprint, tokens=verified)

    def end(self, task: DecodeTask) -> DecodeEvent:
        if task.yielded:
            return DecodeEvent(self._fingerprint, wants_draft=True)
        return DecodeEvent(self._fingerprint, finish=task.finish or "length")

    def error(self, detail: ErrorDetail) -> DecodeEvent:
        return DecodeEvent(self._fingerprint, error=detail)


async def streamed(request: Request, engine: Engine, task: DecodeTask, lines: Lines) -> Response:
    """The answer to a call that streams, once its first tokens are there: until then an error is a status."""
    tokens = stream(engine, task)
    first = await unless_gone(request, anext(tokens))
    return StreamingResponse(_events(task, first, tokens, lines), media_type="application/x-ndjson")


async def _events(
    task: DecodeTask, first: Sequence[Scored], rest: AsyncGenerator[Sequence[Scored], None], lines: Lines
) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield _line(lines.tokens(first))
        try:
            async for tokens in rest:
                yield _line(lines.tokens(tokens))
        except CallError as error:
            yield _line(lines.error(error.detail))
            return
    yield _line(lines.end(task))


def _line(event: msgspec.Struct) -> bytes:
    return msgspec.json.encode(event) + b"\n"
