"""Which way to a verified token is chosen, from costs as they were measured on one CPU and as a GPU might have them."""

from __future__ import annotations

import pytest

from backend.engine.lane_costs import FIXED_SHAPE, Curve, Kind, LaneCosts

CONTEXT = 128
CPU_FAST = {1: 0.017, 8: 0.028, 16: 0.037, 32: 0.062}
CPU_FIXED = {1: 0.021, 8: 0.030, 16: 0.041, 32: 0.066}
PER_TOKEN = 6e-6


def measured(
    fast: dict[int, float], fixed: dict[int, float], window_row: float, more: dict[Kind, float] | None = None
) -> LaneCosts:
    more = {"fast": PER_TOKEN, "fixed": PER_TOKEN, "window": 0.0} | (more or {})
    points: dict[Kind, dict[int, float]] = {"fast": fast, "fixed": fixed, "window": {32: 32 * window_row}}
    return LaneCosts(32, {kind: Curve(points[kind], CONTEXT, more[kind]) for kind in points})


def drafts(costs: LaneCosts, sequences: int, verified: int, context: float = CONTEXT) -> bool:
    return costs.advise(sequences, verified, context).drafts


def test_on_a_cpu_few_among_many_are_drafted_and_many_decoded() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.0015)
    assert drafts(costs, sequences=32, verified=1)
    assert not drafts(costs, sequences=32, verified=32)
    assert not drafts(costs, sequences=8, verified=8)


def test_a_slow_fixed_lane_is_for_verifying_only() -> None:
    costs = measured(CPU_FAST, {rows: 3 * seconds for rows, seconds in CPU_FAST.items()}, window_row=0.0005)
    assert all(drafts(costs, count, verified=count) for count in (1, 8, 32))


def test_a_fixed_lane_as_fast_as_the_fast_one_needs_no_drafts() -> None:
    costs = measured(CPU_FAST, CPU_FAST, window_row=0.001)
    assert not any(drafts(costs, 32, verified=count) for count in (1, 8, 32))


def test_drafts_that_never_agree_are_given_up_and_taken_up_again() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.0001)
    assert drafts(costs, sequences=16, verified=4)
    for _ in range(60):
        costs.observe_verdict(drafted=8, agreed=0)
    assert not drafts(costs, sequences=16, verified=4)
    for _ in range(600):
        costs.observe_verdict(drafted=0, agreed=0)
    assert drafts(costs, sequences=16, verified=4)


def test_a_way_is_kept_until_the_other_is_clearly_cheaper() -> None:
    """The gain of drafting, by the cost of a window's row: where it is small either way stays as it is."""
    window_rows = [0.0001 * step for step in range(60)]
    taken_up = [drafts(measured(CPU_FAST, CPU_FIXED, row), 16, 2) for row in window_rows]

    def kept(row: float) -> bool:
        costs = measured(CPU_FAST, CPU_FIXED, row)
        costs._drafts = True
        return drafts(costs, 16, 2)

    given_up = [kept(row) for row in window_rows]
    first, last = taken_up.index(False), given_up.index(False)
    assert 0 < first < last and not any(taken_up[first:]) and not any(given_up[last:])


def test_the_length_of_the_context_counts() -> None:
    """Where the fixed lane's attention is the slower one, it is as cheap as the fast lane in short contexts alone."""
    costs = measured(CPU_FAST, CPU_FAST, 0.001, {"fast": PER_TOKEN, "fixed": 2 * PER_TOKEN})
    assert not drafts(costs, 16, 2, context=CONTEXT)
    assert drafts(costs, 16, 2, context=2000)


def test_costs_follow_what_is_seen() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.0015)
    assert drafts(costs, sequences=32, verified=1)
    for _ in range(2000):
        costs.observe("fast", 32, CONTEXT, 0.062)
        costs.observe("fixed", 32, CONTEXT, 0.062)
    assert not drafts(costs, sequences=32, verified=1)
    assert costs.seconds["fixed", 32] == pytest.approx(0.062, rel=0.02)


@pytest.mark.parametrize("kind", ["fast", "fixed"])
@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_the_lane_that_is_idle_keeps_pace(kind: Kind, slower: float) -> None:
    """Another load of the machine, seen in one lane alone, says nothing of the difference between the lanes."""
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.0015)
    points = {"fast": CPU_FAST, "fixed": CPU_FIXED}[kind]
    for _ in range(30):
        for rows, seconds in points.items():
            # Of long contexts besides.
            costs.observe(kind, rows, 500, slower * (seconds + PER_TOKEN * rows * (500 - CONTEXT)))
    assert costs.seconds["fast", 16] / costs.seconds["fixed", 16] == pytest.approx(37 / 41, rel=0.05)


def test_one_pass_that_was_held_up_changes_little() -> None:
    costs = measured(CPU_FAST, CPU_FIXED, window_row=0.0015)
    costs.observe("fixed", 16, CONTEXT, 60.0)
    costs.observe("fixed", 16, CONTEXT, 0.0)
    assert costs.seconds["fixed", 16] == pytest.approx(0.041, rel=0.2)


def test_settled_advice_holds_whatever_is_seen() -> None:
    costs = LaneCosts(32, FIXED_SHAPE)
    costs.observe("fast", 3, CONTEXT, 1.0)
    costs.observe_verdict(8, 0)
    assert costs.advise(8, 8, CONTEXT) == FIXED_SHAPE and costs.seconds == {}


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 20, 31, 32, 64, 200])
def test_a_cost_rises_with_the_rows_and_the_context(rows: int) -> None:
    curve = Curve(CPU_FAST, CONTEXT, PER_TOKEN)
    assert 0 < curve.seconds(rows, CONTEXT) <= curve.seconds(rows + 1, CONTEXT)
    assert 0 < curve.seconds(rows, 0) <= curve.seconds(rows, CONTEXT) < curve.seconds(rows, 4000)
