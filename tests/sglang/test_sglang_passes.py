"""How a pass's groups are shared, and how verify calls become passes and answers, with a scheduler played in Python."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.protocol import Sampling, VerifyRequest
from backend.server.errors import CallError
from backend.sglang.passes import Choice, Done, PassFailedError, Span, share_groups
from backend.sglang.replay import Replay
from backend.sglang.verify_queue import VerifyQueue

WINDOW, GROUPS, LIMIT = 4, 3, 60


def next_token(tokens: Sequence[int]) -> int:
    """The toy model: a function of the prefix."""
    return hash(tuple(tokens)) % 5


class Scheduler:
    """Runs passes as the real one does: knows which prefixes are verified, computes what fits, chooses for each row."""

    def __init__(self) -> None:
        self.verified: set[tuple[int, ...]] = set()
        self.largest = 0
        self.passes = 0
        self.starved = 0
        self.forgets = 0

    async def run(self, spans: Sequence[Span]) -> list[Done]:
        self.passes += 1
        assert 0 < len(spans) <= GROUPS
        await asyncio.sleep(0)
        if self.starved:
            self.starved -= 1
            return [Done(span.wanted, span.wanted, []) for span in spans]
        starts = [self._start(span) for span in spans]
        left = [len(span.tokens) - start for span, start in zip(spans, starts, strict=True)]
        done = []
        for span, start, groups in zip(spans, starts, share_groups(left, GROUPS, WINDOW), strict=True):
            stop = min(len(span.tokens), start + groups * WINDOW)
            self.verified.update(tuple(span.tokens[: row + 1]) for row in range(start, stop))
            rows = range(max(start, span.wanted), stop)
            done.append(Done(start, stop, [Choice(next_token(span.tokens[: row + 1]), -1.0, []) for row in rows]))
        if self.forgets:
            self.forgets -= 1
            self.verified.clear()
        return done

    def _start(self, span: Span) -> int:
        start = 0
        while start < span.wanted and tuple(span.tokens[: start + 1]) in self.verified:
            start += 1
        return start


def expected(call: VerifyRequest) -> tuple[int, list[int], str | None]:
    """What the protocol asks for: agreed drafts, then the verifier's own token, unless the sequence ends before."""
    tokens: list[int] = []
    while True:
        token = next_token([*call.context, *tokens])
        agrees = len(tokens) < len(call.draft) and call.draft[len(tokens)] == token
        tokens.append(token)
        finish = "stop" if token in call.stop_ids else None
        if finish is None and len(call.context) + len(tokens) >= LIMIT:
            finish = "length"
        if finish or not agrees:
            return len(tokens) - (0 if agrees else 1), tokens, finish


def a_call(context: list[int], honest: int, lies: list[int], stop_ids: list[int]) -> VerifyRequest:
    draft: list[int] = []
    for _ in range(honest):
        draft.append(next_token([*context, *draft]))
    return VerifyRequest(context=context, generated=0, draft=draft + lies, sampling=Sampling(), stop_ids=stop_ids)


ids = st.integers(0, 4)
calls = st.builds(
    a_call,
    st.lists(ids, min_size=1, max_size=40),
    st.integers(0, 9),
    st.lists(ids, max_size=5),
    st.lists(ids, max_size=1),
)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 8), st.integers(1, 9))
def test_groups_are_shared_fairly_and_none_is_wasted(rows: list[int], groups: int, window: int) -> None:
    shares = share_groups(rows, groups, window)
    needs = [-(-count // window) for count in rows]
    assert all(share <= need for share, need in zip(shares, needs, strict=True))
    assert sum(shares) == min(groups, sum(needs))
    waiting = [index for index, need in enumerate(needs) if need and not shares[index]]
    if waiting:
        assert all(share <= 1 for share in shares) and all(not needs[i] or shares[i] for i in range(waiting[0]))


@given(st.lists(calls, min_size=1, max_size=8), st.integers(0, 3), st.integers(0, 3))
def test_calls_are_answered_as_if_alone(batch: list[VerifyRequest], starved: int, forgets: int) -> None:
    """Whoever shares the passes, whatever is evicted between two of them, however long memory is missing."""

    async def run() -> None:
        scheduler = Scheduler()
        scheduler.starved, scheduler.forgets = starved, forgets
        queue = VerifyQueue(scheduler.run, GROUPS, LIMIT, pool_tokens=100)
        serving = asyncio.create_task(queue.serve())
        try:
            answers = await asyncio.gather(*(queue.verify(call) for call in batch))
        finally:
            serving.cancel()
        for call, replay in zip(batch, answers, strict=True):
            assert (replay.agreed, [token.id for token in replay.tokens], replay.finish) == expected(call)

    asyncio.run(run())


async def test_long_calls_are_admitted_as_the_pool_holds_them() -> None:
    """Else each would evict the others' prefixes before their next turn."""
    scheduler = Scheduler()
    queue = VerifyQueue(scheduler.run, GROUPS, LIMIT, pool_tokens=90)
    calls = [asyncio.create_task(queue.verify(a_call([index] * 40, 0, [], []))) for index in range(4)]
    await asyncio.sleep(0)
    serving = asyncio.create_task(queue.serve())
    await asyncio.sleep(0)
    assert repr(queue) == "<VerifyQueue admitted=1 waiting=3>"
    await asyncio.gather(*calls)
    # 40 rows at 3 groups of 4 rows are 4 passes each: nothing was computed twice.
    assert scheduler.passes == 16
    serving.cancel()


async def test_a_call_that_is_given_up_makes_room() -> None:
    scheduler = Scheduler()
    queue = VerifyQueue(scheduler.run, GROUPS, LIMIT, pool_tokens=90)
    gone = asyncio.create_task(queue.verify(a_call([1], 0, [], [])))
    stays = asyncio.create_task(queue.verify(a_call([2], 0, [], [])))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert repr(queue) == "<VerifyQueue admitted=0 waiting=1>"
    serving = asyncio.create_task(queue.serve())
    assert (await stays).done
    serving.cancel()


async def test_a_pass_that_breaks_breaks_its_calls_and_no_others() -> None:
    scheduler = Scheduler()
    broken = True

    async def run(spans: Sequence[Span]) -> list[Done]:
        nonlocal broken
        if broken:
            broken = False
            raise PassFailedError("no luck")
        return await scheduler.run(spans)

    queue = VerifyQueue(run, GROUPS, LIMIT, pool_tokens=90)
    serving = asyncio.create_task(queue.serve())
    with pytest.raises(CallError, match="no luck"):
        await queue.verify(a_call([1], 0, [], []))
    assert (await queue.verify(a_call([1], 0, [], []))).done
    serving.cancel()


def test_logits_that_are_not_finite_are_an_error_only_where_they_count() -> None:
    call = VerifyRequest(context=[1, 2], generated=0, draft=[3, 3])
    replay = Replay(call, LIMIT)
    replay.take(Done(0, 4, [Choice(4, -1.0, []), Choice(-1, 0.0, [])]))
    assert replay.done and not replay.broken, "the row behind a refused draft says nothing"
    replay = Replay(call, LIMIT)
    replay.take(Done(0, 4, [Choice(3, -1.0, []), Choice(-1, 0.0, [])]))
    assert replay.broken
