"""Which rows run next, on tasks without tensors: turns of the queues, groups of windows, budgets."""

from __future__ import annotations

import random

import pytest

from backend.engine.admission import Admission
from backend.engine.lane_costs import FIXED_SHAPE, LaneCosts
from backend.engine.prefix_cache import PrefixCache
from backend.engine.scheduler import Limits, Pass, Scheduler
from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import Batching, Sampling, VerifyShape

GREEDY = Sampling(temperature=0.0)
SHAPE = VerifyShape(groups=3, window=8)


def scheduler(group_wait: int = 0, shape_invariant: bool = True, prefill_rows: int = 16) -> Scheduler:
    limits = Limits(SHAPE, max_context=512, prefill_rows=prefill_rows, group_wait=group_wait)
    costs = LaneCosts(SHAPE.window, FIXED_SHAPE)
    return Scheduler(Admission(PrefixCache(64, 64, first=2), 64, 64), limits, shape_invariant, costs)


def stream(context: list[int], count: int = 50, batching: Batching = "dynamic") -> DecodeTask:
    return DecodeTask(context, count, GREEDY, frozenset(), top=0, is_draft=False, batching=batching)


def draft(context: list[int], count: int = 50) -> DecodeTask:
    return DecodeTask(context, count, GREEDY, frozenset(), top=0, is_draft=True)


def window(context: list[int], drafted: int = 5, fixed: bool = True) -> VerifyTask:
    """A verify call; `fixed`: as if its context had been verified before."""
    task = VerifyTask(context, [0] * drafted, GREEDY, frozenset(), top=0)
    task.computed = len(context) - 1 if fixed else 0
    return task


def submit(scheduler: Scheduler, *tasks: Task) -> None:
    """Let the tasks in; those that come with computed tokens keep them."""
    computed = [task.computed for task in tasks]
    for task in tasks:
        scheduler.submit(task)
    scheduler.admit()
    for task, count in zip(tasks, computed, strict=True):
        task.computed = max(task.computed, count)


def run(scheduler: Scheduler, passes: int) -> list[Pass]:
    """Run passes in which every row chooses token 7."""
    done: list[Pass] = []
    for _ in range(passes):
        work = scheduler.next_pass()
        if work is None:
            break
        done.append(work)
        scheduler.apply(work, [[Scored(7, 0.0, 0.0, [])] * span.choices for span in work.spans])
        scheduler.admission._cache.check_integrity()
    return done


def test_the_three_queues_take_turns() -> None:
    schedule = scheduler(shape_invariant=False)
    submit(schedule, stream([1]), stream([2], batching="none"), stream([3], batching="invariant"))
    kinds = [(work.lane, work.spans[0].task.batching) for work in run(schedule, 9)]  # type: ignore[union-attr]
    assert kinds == [("fast", "dynamic"), ("fixed", "invariant"), ("fast", "none")] * 3


@pytest.mark.parametrize("group_wait", [0, 3])
def test_windows_wait_for_others_while_drafts_decode(group_wait: int) -> None:
    schedule = scheduler(group_wait)
    submit(schedule, draft([1, 2]), window([5, 6]))
    lanes = [work.lane for work in run(schedule, 5)]
    assert lanes.index("fixed") == max(1, group_wait), "it has its turn, or waits for as long as it may"


def test_a_full_group_does_not_wait() -> None:
    schedule = scheduler(group_wait=3)
    submit(schedule, draft([1, 2]), *(window([5, i]) for i in range(3)))
    assert [(work.lane, len(work.spans)) for work in run(schedule, 2)] == [("fast", 1), ("fixed", 3)]


def test_windows_wait_for_nothing_but_drafts() -> None:
    for company in (stream([1, 2]), stream([1, 2], batching="none")):
        schedule = scheduler(group_wait=3)
        submit(schedule, company, window([5, 6]))
        assert "fixed" in [work.lane for work in run(schedule, 2)]


def test_a_prompt_does_not_wait() -> None:
    schedule = scheduler(group_wait=3)
    submit(schedule, draft([1, 2]), window([5, 6, 7], drafted=0, fixed=False))
    assert [work.lane for work in run(schedule, 2)] == ["fast", "fixed"]


def test_rows_of_a_pass_stay_within_its_budget() -> None:
    """Random traffic: prompts come in chunks, windows in groups, and every task ends."""
    rng = random.Random(1)
    for shape_invariant in (True, False):
        schedule = scheduler(2, shape_invariant)
        tasks: list[Task] = []
        for number in range(30):
            context = [number] * rng.randint(1, 120)
            tasks.append(
                rng.choice(
                    [
                        stream(context, rng.randint(1, 20), rng.choice(["dynamic", "invariant", "none"])),
                        draft(context, rng.randint(1, 20)),
                        VerifyTask(context, [7] * rng.randint(0, 20), GREEDY, frozenset(), top=0),
                    ]
                )
            )
            schedule.submit(tasks[-1])
        while True:
            schedule.admit()
            passes = run(schedule, 1)
            if not passes:
                break
            (work,) = passes
            rows = [span.count for span in work.spans]
            if max(rows) == 1:
                assert len(rows) <= 64
            elif work.lane == "fast":
                assert sum(rows) <= 16
            else:
                assert sum(rows) <= SHAPE.groups * SHAPE.window
                assert shape_invariant or (len(rows) <= SHAPE.groups and max(rows) <= SHAPE.window)
        assert all(task.done for task in tasks)
        assert not schedule.admission.running and not schedule.admission.waiting
