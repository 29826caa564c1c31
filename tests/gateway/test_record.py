"""What a record makes of what is noted in it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Overloaded, RequestError
from gateway.telemetry import record as module
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.loop_lag import watch_lag
from gateway.telemetry.record import Record, begin_recording, recording
from gateway.telemetry.traffic import Traffic

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=6)


@given(SPANS)
def test_own_time_is_what_no_call_covers(spans: list[list[int]]) -> None:
    """Whatever overlaps: a moment counts as waiting where at least one call is out."""
    record, clock = Record(began=0.0), [0.0]
    events = sorted([(end, "go_on") for _, end in spans] + [(begin, "call") for begin, _ in spans], key=lambda e: e[0])
    # Of events at one moment calls come first, so that an empty one begins before it ends.
    events.sort(key=lambda event: (event[0], event[1] == "go_on"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter", lambda: clock[0])
        for at, what in events:
            clock[0] = float(at)
            getattr(record, what)()
    record.ended = 20.0
    ticks = sorted({0, 20, *(tick for span in spans for tick in span)})
    covered = sum(b - a for a, b in pairwise(ticks) if any(x <= a and b <= y for x, y in spans))
    assert record.own_s == (20.0 - covered if spans else None)


def test_a_request_that_still_waits_has_no_own_time() -> None:
    record = Record(began=0.0, ended=1.0)
    record.call()
    assert record.own_s is None


def test_what_went_wrong_first_counts() -> None:
    record = Record()
    record.fail_with(Overloaded("full", reason="places", retry_after_s="1"))
    record.fail_with(RequestError("and another thing"))
    assert (record.code, record.reason) == ("rate_limit_exceeded", "places")


async def test_a_task_notes_in_the_record_of_the_request_that_began_it() -> None:
    async def note(tokens: int) -> None:
        recording().finish_choice(tokens)

    async def serve(tokens: int) -> Record:
        mine = Record()
        begin_recording(mine)
        await asyncio.gather(*(asyncio.create_task(note(tokens)) for _ in range(2)))
        return mine

    records = await asyncio.gather(*(asyncio.create_task(serve(tokens)) for tokens in (3, 5)))
    assert [(record.completion_tokens, record.longest) for record in records] == [(6, 3), (10, 5)]
    assert recording() is not recording(), "outside of a request what is noted is lost"


def test_times_are_those_of_answers_without_an_error() -> None:
    traffic = Traffic()
    for code, mode in (("", "verified"), ("backend_failed", "verified"), ("", "")):
        traffic.add(
            Record(status=200, code=code, mode=mode, model="m", ended=1.0, first_at=0.5, last_at=0.9, longest=5)
        )
    assert traffic.requests.total() == 3
    (durations,), (gaps,) = traffic.durations.values(), traffic.between_tokens.values()
    assert (durations.count, gaps.count) == (1, 1)
    assert gaps.sum == pytest.approx(0.1)


async def test_lag_is_what_a_sleep_takes_too_long() -> None:
    now, late, lag = [100.0], iter([0.0, 0.02, 3.0]), Histogram([0.01, 0.1, 1.0])

    async def sleep(seconds: float) -> None:
        now[0] += seconds + next(late)

    with pytest.raises(RuntimeError):  # what a coroutine makes of the end of `late`
        await watch_lag(lag, lambda: now[0], sleep)
    assert [count for _, count in lag.buckets()] == [1, 2, 2, 3]
    assert lag.sum == pytest.approx(3.02)
