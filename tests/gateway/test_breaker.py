"""The breaker opens after failures in a row, lets one call try, and never forgets to close."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker import FIRST_OPEN_S, LONGEST_OPEN_S, THRESHOLD, Breaker


def opened(at: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(THRESHOLD):
        breaker.begin(at)
        breaker.settled()
        breaker.failed(at)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(3 * THRESHOLD):
        for _ in range(THRESHOLD - 1):
            breaker.failed(0.0)
        assert breaker.allows(0.0)
        breaker.succeeded()
    assert not opened(100.0).allows(100.0)
    assert not opened(100.0).allows(100.0 + 0.9 * FIRST_OPEN_S)


def test_half_open_lets_one_call_try() -> None:
    breaker, later = opened(100.0), 100.0 + FIRST_OPEN_S
    assert breaker.allows(later)
    breaker.begin(later)
    assert not breaker.allows(later)
    breaker.settled()
    assert breaker.allows(later), "a call that was cancelled says nothing"
    breaker.begin(later)
    breaker.succeeded()
    assert breaker.allows(later)
    for _ in range(THRESHOLD - 1):
        breaker.failed(later)
    assert breaker.allows(later), "it begins to count anew"


def test_a_failed_trial_makes_it_longer_up_to_a_bound() -> None:
    breaker, now, open_s = opened(0.0), 0.0, FIRST_OPEN_S
    for _ in range(10):
        now += open_s
        assert not breaker.allows(now - 0.001)
        breaker.begin(now)
        breaker.settled()
        breaker.failed(now)
        open_s = min(2 * open_s, LONGEST_OPEN_S)
        assert not breaker.allows(now + open_s - 0.001)
        assert breaker.allows(now + open_s)


def test_failures_of_calls_from_before_the_opening_do_not_make_it_longer() -> None:
    breaker = opened(100.0)
    for _ in range(10):
        breaker.failed(100.5)
    assert breaker.allows(100.0 + FIRST_OPEN_S)


@given(st.lists(st.tuples(st.sampled_from(["succeeded", "settled", "failed"]), st.floats(0, 40))))
def test_whatever_happened_it_is_closed_again_after_a_success(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for name, pause_s in events:
        now += pause_s
        if breaker.allows(now):
            breaker.begin(now)
            breaker.settled()
            if name == "succeeded":
                breaker.succeeded()
            elif name == "failed":
                breaker.failed(now)
        assert breaker.allows(now + LONGEST_OPEN_S)
    now += LONGEST_OPEN_S
    breaker.begin(now)
    breaker.succeeded()
    assert repr(breaker) == "<Breaker closed failures=0>"
