"""Which way to a verified token is chosen, from costs as they were measured on one CPU and as a GPU might have them."""

from __future__ import annotations

import pytest

from backend.engine.lane_costs import LaneCosts


def measured(fast: dict[int, float], fixed: dict[int, float], window_row: float) -> LaneCosts:
    costs = LaneCosts(window=32)
    for rows, seconds in fast.items():
        costs.observe("fast", rows, seconds)
    for rows, seconds in fixed.items():
        costs.observe("fixed", rows, seconds)
    costs.observe("window", 32, 32 * window_row)
    return costs


CPU_FAST = {1: 0.023, 8: 0.039, 32: 0.115}
CPU_FIXED = {1: 0.028, 8: 0.045, 32: 0.127}


def test_on_a_cpu_few_among_many_are_drafted_and_many_decoded() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.002)
    assert costs.advise(sequences=32, verified=1).drafts
    assert not costs.advise(sequences=32, verified=32).drafts
    assert not costs.advise(sequences=8, verified=8).drafts


def test_a_slow_fixed_lane_is_for_verifying_only() -> None:
    costs = measured(CPU_FAST, {rows: 3 * seconds for rows, seconds in CPU_FAST.items()}, window_row=0.0005)
    assert all(costs.advise(sequences=count, verified=count).drafts for count in (1, 8, 32))


def test_a_fixed_lane_as_fast_as_the_fast_one_needs_no_drafts() -> None:
    costs = measured(CPU_FAST, CPU_FAST, window_row=0.0001)
    assert not any(costs.advise(sequences=32, verified=count).drafts for count in (1, 8, 32))


def test_drafts_that_never_agree_are_given_up_and_taken_up_again() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.0001)
    assert costs.advise(sequences=16, verified=8).drafts
    for _ in range(60):
        costs.observe_verdict(drafted=8, agreed=0)
    assert not costs.advise(sequences=16, verified=8).drafts
    for _ in range(600):
        costs.observe_verdict(drafted=0, agreed=0)
    assert costs.advise(sequences=16, verified=8).drafts


def test_costs_follow_what_is_seen() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.002)
    assert costs.advise(sequences=32, verified=1).drafts
    for _ in range(100):
        costs.observe("fixed", 33, 0.1152)
    assert not costs.advise(sequences=32, verified=1).drafts


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 20, 31, 32, 64, 200])
def test_a_cost_never_falls_with_more_rows(rows: int) -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.002)
    assert costs._cost("fast", rows) <= costs._cost("fast", rows + 1)
