"""The driver commits the verifier's sequence, and each of its awaits can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from backend.protocol import (
    DraftRequest,
    DraftResponse,
    DraftToken,
    ErrorDetail,
    Sampling,
    ScoredToken,
    StreamEvent,
    StreamRequest,
    StreamToken,
    VerifiedToken,
    VerifyRequest,
    VerifyResponse,
)
from gateway.domain import Commit, Counts, Finished, Job, Scored, Token
from gateway.driver import Progress, run_fast, run_verified
from gateway.dvr import Verifier
from gateway.errors import BackendFailed, ProtocolViolation

VERIFIER = Verifier("f", 100)
JOB = Job((1, 2), Sampling(seed=5), 6, (99,), 1)


class Scripted:
    """Counts upwards; blocks in the call named `block`, and records what was cancelled."""

    def __init__(self, block: str = "", events: list[StreamEvent] | None = None, *, wants_draft: bool = True) -> None:
        self._block = block
        self._events = events or []
        self._wants_draft = wants_draft
        self.blocked = asyncio.Event()
        self.cancelled: list[str] = []
        self.requests: list[msgspec.Struct] = []

    async def draft(self, request: DraftRequest) -> DraftResponse:
        await self._pause("draft", request)
        start = request.context[-1] + 1
        return DraftResponse([DraftToken(start + i, -0.5, 1.0) for i in range(request.count)], "f")

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        await self._pause("verify" if request.draft else "extend" if request.extend else "prefill", request)
        own = [*request.context, *request.draft][-1] + 1
        ids = [*request.draft, *range(own, own + 1 + request.extend)]
        tokens = [VerifiedToken(i, -0.5, [ScoredToken(i, -0.5)]) for i in ids]
        return VerifyResponse(len(request.draft), tokens, None, "f", self._wants_draft)

    async def stream(self, request: StreamRequest) -> AsyncGenerator[StreamEvent]:
        try:
            for event in self._events:
                yield event
            await self._pause("stream", request)
        except GeneratorExit:
            self.cancelled.append("stream")
            raise

    async def _pause(self, name: str, request: msgspec.Struct) -> None:
        self.requests.append(request)
        if name != self._block:
            return
        self.blocked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


def token(id_: int) -> Token:
    return Token(id_, -0.5, (Scored(id_, -0.5),))


async def collect(progress: AsyncGenerator[Progress]) -> list[Progress]:
    return [step async for step in progress]


async def test_verified() -> None:
    backend = Scripted()
    steps = await collect(run_verified(backend, JOB, (2,), VERIFIER))
    assert steps == [
        Commit((token(3),), Counts(windows=1)),
        Commit((token(4), token(5), token(6)), Counts(windows=2, drafted=2)),
        Commit((token(7), token(8)), Counts(windows=3, drafted=3)),
        Finished("length"),
    ]
    assert backend.requests == [
        VerifyRequest([1, 2], 0, [], Sampling(seed=5), [99], 1),
        DraftRequest([1, 2, 3], 1, 2, Sampling(seed=5), [99]),
        VerifyRequest([1, 2, 3], 1, [4, 5], Sampling(seed=5), [99], 1),
        DraftRequest([1, 2, 3, 4, 5, 6], 4, 1, Sampling(seed=5), [99]),
        VerifyRequest([1, 2, 3, 4, 5, 6], 4, [7], Sampling(seed=5), [99], 1),
    ]


@pytest.mark.parametrize(("wants_draft", "drafts"), [(False, True), (True, False)])
async def test_verified_without_drafts(wants_draft: bool, drafts: bool) -> None:
    backend = Scripted(wants_draft=wants_draft)
    steps = await collect(run_verified(backend, JOB, (2,), VERIFIER, drafts=drafts))
    assert steps == [
        Commit((token(3),), Counts(windows=1)),
        Commit((token(4), token(5), token(6)), Counts(windows=2)),
        Commit((token(7), token(8)), Counts(windows=3)),
        Finished("length"),
    ]
    assert backend.requests == [
        VerifyRequest([1, 2], 0, [], Sampling(seed=5), [99], 1),
        VerifyRequest([1, 2, 3], 1, [], Sampling(seed=5), [99], 1, extend=2),
        VerifyRequest([1, 2, 3, 4, 5, 6], 4, [], Sampling(seed=5), [99], 1, extend=1),
    ]


@pytest.mark.parametrize("block", ["prefill", "draft", "verify", "extend", "stream"])
async def test_every_await_can_be_cancelled(block: str) -> None:
    backend = Scripted(block, wants_draft=block != "extend")
    run = run_fast(backend, JOB, 100) if block == "stream" else run_verified(backend, JOB, (2,), VERIFIER)
    consumer = asyncio.create_task(collect(run))
    await backend.blocked.wait()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert backend.cancelled == [block]


async def test_a_consumer_that_stops_listening_closes_the_stream() -> None:
    backend = Scripted(events=[StreamEvent([StreamToken(3, -0.5)]), StreamEvent([StreamToken(4, -0.5)])])
    run = run_fast(backend, JOB, 100)
    assert isinstance(await anext(run), Commit)
    await run.aclose()
    assert backend.cancelled == ["stream"]


async def test_a_consumer_that_stops_listening_ends_the_loop() -> None:
    backend = Scripted()
    run = run_verified(backend, JOB, (2,), VERIFIER)
    await anext(run)
    await run.aclose()
    assert len(backend.requests) == 1


def events(*groups: list[int], finish: str | None = "length") -> list[StreamEvent]:
    made = [StreamEvent([StreamToken(id_, -0.5, [ScoredToken(id_, -0.5)]) for id_ in group]) for group in groups]
    return [*made, StreamEvent(finish=finish)] if finish else made  # type: ignore[arg-type]


async def test_fast() -> None:
    steps = await collect(run_fast(Scripted(events=events([3, 4], [5])), JOB, 100))
    assert steps == [Commit((token(3), token(4)), Counts()), Commit((token(5),), Counts()), Finished("length")]


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (events([3], finish=None), BackendFailed),
        ([], BackendFailed),
        ([*events([3], finish=None), StreamEvent(error=ErrorDetail("internal", "out of memory"))], BackendFailed),
        (events([3, 4, 5, 6], [7, 8, 9]), ProtocolViolation),
        (events([100]), ProtocolViolation),
        (events([-1]), ProtocolViolation),
        ([*events([3]), *events([4])], ProtocolViolation),
    ],
)
async def test_a_broken_stream(stream: list[StreamEvent], error: type[Exception]) -> None:
    with pytest.raises(error):
        await collect(run_fast(Scripted(events=stream), JOB, 100))


async def test_a_broken_verifier() -> None:
    with pytest.raises(ProtocolViolation):
        await collect(run_verified(Scripted(), JOB, (2,), Verifier("other", 100)))
