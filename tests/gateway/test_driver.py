"""The driver commits the verifier's sequence, and each of its awaits can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from backend.protocol import (
    DecodeEvent,
    DecodeRequest,
    DraftRequest,
    DraftResponse,
    DraftToken,
    ErrorDetail,
    Role,
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
from gateway.errors import BackendFailed, BackendRefused, BackendUnavailable, ProtocolViolation

VERIFIER = Verifier("f", 100)
ROLES: tuple[Role, ...] = ("draft", "verify")
DECODING: tuple[Role, ...] = (*ROLES, "decode")
JOB = Job((1, 2), Sampling(seed=5), 6, (99,), 1)


class Scripted:
    """Counts upwards, and adds one more at position `differs_at`. Blocks in the calls named in `block`: for each of
    them it releases `blocked`, and it records which were cancelled."""

    def __init__(
        self,
        *block: str,
        events: list[StreamEvent] | None = None,
        decoded: list[list[DecodeEvent]] | None = None,
        wants_draft: bool = True,
        ahead: bool = False,
        differs_at: int | None = None,
    ) -> None:
        self._block = block
        self._events = events or []
        self._decoded = decoded or []
        self._wants_draft = wants_draft
        self._ahead = ahead
        self._differs_at = differs_at
        self.blocked = asyncio.Semaphore(0)
        self.cancelled: list[str] = []
        self.requests: list[msgspec.Struct] = []
        self.verifying = 0
        self.release = asyncio.Event()

    async def draft(self, request: DraftRequest) -> DraftResponse:
        await self._pause("draft ahead" if self.verifying else "draft", request)
        start = request.context[-1] + 1
        return DraftResponse([DraftToken(start + i, -0.5, 1.0) for i in range(request.count)], "f")

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        self.verifying += 1
        try:
            await self._pause("verify" if request.draft else "prefill", request)
            await asyncio.sleep(0)  # A draft sent along arrives meanwhile.
        finally:
            self.verifying -= 1
        ids: list[int] = []
        for drafted in [*request.draft, None]:
            ids.append([*request.context, *ids][-1] + (2 if len(request.context) + len(ids) == self._differs_at else 1))
            if drafted not in (None, ids[-1]):
                break
        agreed = sum(drafted == id_ for drafted, id_ in zip(request.draft, ids, strict=False))
        tokens = [VerifiedToken(i, -0.5, [ScoredToken(i, -0.5)]) for i in ids]
        return VerifyResponse(agreed, tokens, None, "f", self._wants_draft, self._ahead)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent]:
        try:
            await self._pause("decode", request)
            for event in self._decoded.pop(0):
                yield event
        except GeneratorExit:
            self.cancelled.append("decode")
            raise

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
        if name not in self._block:
            return
        self.blocked.release()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


def token(id_: int) -> Token:
    return Token(id_, -0.5, (Scored(id_, -0.5),))


async def collect(progress: AsyncGenerator[Progress]) -> list[Progress]:
    return [step async for step in progress]


async def test_verified() -> None:
    backend = Scripted()
    steps = await collect(run_verified(backend, JOB, (2,), VERIFIER, ROLES))
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


def decoded(*groups: list[int], finish: str | None = None, wants_draft: bool = False) -> list[DecodeEvent]:
    tokens = [[VerifiedToken(i, -0.5, [ScoredToken(i, -0.5)]) for i in group] for group in groups]
    end = DecodeEvent("f", finish=finish, wants_draft=wants_draft)  # type: ignore[arg-type]
    return [*(DecodeEvent("f", group) for group in tokens), *([end] if finish or wants_draft else [])]


async def test_decoding_and_drafting_take_turns_by_the_verifiers_advice() -> None:
    backend = Scripted(decoded=[decoded([3], [4], wants_draft=True), decoded([8], finish="length")], wants_draft=False)
    steps = await collect(run_verified(backend, JOB, (2,), VERIFIER, DECODING))
    assert steps == [
        Commit((token(3),), Counts(windows=1)),
        Commit((token(4),), Counts(windows=1)),
        Commit((token(5), token(6), token(7)), Counts(windows=2, drafted=2)),
        Commit((token(8),), Counts(windows=3, drafted=2)),
        Finished("length"),
    ]
    assert backend.requests == [
        DecodeRequest([1, 2], 0, 6, True, Sampling(seed=5), [99], 1),
        DraftRequest([1, 2, 3, 4], 2, 2, Sampling(seed=5), [99]),
        VerifyRequest([1, 2, 3, 4], 2, [5, 6], Sampling(seed=5), [99], 1),
        DecodeRequest([1, 2, 3, 4, 5, 6, 7], 5, 1, True, Sampling(seed=5), [99], 1),
    ]


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (decoded([3]), BackendFailed),
        ([], BackendFailed),
        ([*decoded([3]), DecodeEvent("f", error=ErrorDetail("internal", "out of memory"))], BackendFailed),
        ([*decoded([3], finish="length"), *decoded([4])], ProtocolViolation),
        (decoded([100]), ProtocolViolation),
        ([DecodeEvent("other")], ProtocolViolation),
    ],
)
async def test_a_broken_decode_call(events: list[DecodeEvent], error: type[Exception]) -> None:
    with pytest.raises(error):
        await collect(run_verified(Scripted(decoded=[events]), JOB, (2,), VERIFIER, DECODING))


async def test_a_consumer_that_stops_listening_closes_the_decode_call() -> None:
    backend = Scripted(decoded=[decoded([3], [4], finish="length")])
    run = run_verified(backend, JOB, (2,), VERIFIER, DECODING)
    await anext(run)
    await run.aclose()
    assert backend.cancelled == ["decode"]


LONG = Job((1, 2), Sampling(seed=5), 40, (99,), 1)


async def test_drafting_ahead() -> None:
    backend = Scripted(ahead=True)
    steps = await collect(run_verified(backend, LONG, (2,), VERIFIER, ROLES))
    assert [t.id for step in steps if isinstance(step, Commit) for t in step.tokens] == list(range(3, 43))
    drafts = [request for request in backend.requests if isinstance(request, DraftRequest)]
    assert drafts[1] == DraftRequest([1, 2, 3, 4, 5], 3, 3, Sampling(seed=5), [99]), "it goes out beside the window's"
    assert isinstance(steps[-2], Commit)
    assert steps[-2].counts == Counts(windows=14, drafted=26, ahead=12)


async def test_a_refused_window_cancels_the_draft_ahead_at_once() -> None:
    backend = Scripted("draft ahead", ahead=True, differs_at=4)
    run = run_verified(backend, LONG, (2,), VERIFIER, ROLES)
    await anext(run)
    commit = await anext(run)
    assert isinstance(commit, Commit)
    assert [t.id for t in commit.tokens] == [4, 6]
    assert not backend.blocked.locked()
    assert backend.cancelled == ["draft ahead"], "before the consumer sees the commit"
    await run.aclose()


async def test_a_draft_ahead_runs_on_while_the_consumer_is_busy() -> None:
    backend = Scripted("draft ahead", ahead=True)
    run = run_verified(backend, LONG, (2,), VERIFIER, ROLES)
    await anext(run)
    await anext(run)  # The window stands; the draft ahead of it is still in flight.
    backend.release.set()
    steps = [step async for step in run]
    assert backend.cancelled == []
    assert steps[-1] == Finished("length")


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_drafter_that_is_gone_is_not_asked_again(ahead: bool) -> None:
    class Drafterless(Scripted):
        drafts = 0

        async def draft(self, request: DraftRequest) -> DraftResponse:
            self.drafts += 1
            if self.drafts == 1 + ahead:
                raise BackendUnavailable("gone")
            return await super().draft(request)

    backend = Drafterless(ahead=ahead)
    steps = await collect(run_verified(backend, LONG, (2,), VERIFIER, ROLES))
    assert [t.id for step in steps if isinstance(step, Commit) for t in step.tokens] == list(range(3, 43))
    assert backend.drafts == 1 + ahead


async def test_an_error_of_one_call_cancels_the_other() -> None:
    class Breaking(Scripted):
        async def verify(self, request: VerifyRequest) -> VerifyResponse:
            answer = await super().verify(request)
            if request.draft:
                await self.blocked.acquire()
                raise BackendFailed("broken")
            return answer

    backend = Breaking("draft ahead", ahead=True)
    with pytest.raises(BackendFailed):
        await collect(run_verified(backend, LONG, (2,), VERIFIER, ROLES))
    assert backend.cancelled == ["draft ahead"]


@pytest.mark.parametrize("block", ["prefill", "draft", "draft ahead", "verify", "decode", "stream"])
async def test_every_await_can_be_cancelled(block: str) -> None:
    backend = Scripted(block, ahead=block == "draft ahead")
    roles = DECODING if block == "decode" else ROLES
    run = run_fast(backend, JOB, 100) if block == "stream" else run_verified(backend, LONG, (2,), VERIFIER, roles)
    consumer = asyncio.create_task(collect(run))
    await backend.blocked.acquire()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert backend.cancelled == [block]


async def test_both_calls_in_flight_are_cancelled() -> None:
    backend = Scripted("draft ahead", "verify", ahead=True)
    consumer = asyncio.create_task(collect(run_verified(backend, LONG, (2,), VERIFIER, ROLES)))
    await backend.blocked.acquire()
    await backend.blocked.acquire()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert sorted(backend.cancelled) == ["draft ahead", "verify"]


async def test_a_consumer_that_stops_listening_closes_the_stream() -> None:
    backend = Scripted(events=[StreamEvent([StreamToken(3, -0.5)]), StreamEvent([StreamToken(4, -0.5)])])
    run = run_fast(backend, JOB, 100)
    assert isinstance(await anext(run), Commit)
    await run.aclose()
    assert backend.cancelled == ["stream"]


async def test_a_consumer_that_stops_listening_ends_the_loop() -> None:
    backend = Scripted()
    run = run_verified(backend, JOB, (2,), VERIFIER, ROLES)
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
        ([*events([3], finish=None), StreamEvent(error=ErrorDetail("invalid_request", "no", "x"))], BackendRefused),
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
        await collect(run_verified(Scripted(), JOB, (2,), Verifier("other", 100), ROLES))
