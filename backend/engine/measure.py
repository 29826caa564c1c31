"""Times a few passes of each lane at start, so that the engine knows its costs before the first call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from backend.engine.checkpoint import ModelConfig
from backend.engine.kv_pool import RESERVED_BLOCKS
from backend.engine.lane_costs import LaneCosts
from backend.engine.prefix_cache import Lease
from backend.engine.runner import Runner
from backend.engine.scheduler import Lane, Pass, Span
from backend.engine.tasks import DecodeTask, Task, VerifyTask
from backend.kernels.attention import BLOCK
from backend.protocol import Sampling

_CONTEXT = 2 * BLOCK
_SEQUENCES = (1, 2, 4, 8, 16, 32)
MEASURE_BLOCKS = -(-_CONTEXT // BLOCK)
"""Blocks of KV that the measurement needs. Its sequences share them: it is after the time alone."""


Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment."""


def pass_clock(device: str, threads: int) -> Clock:
    """The clock that tells what passes cost.

    Where one thread does all the work it is that thread's CPU time, which does not count what other processes take:
    they would make the lane that ran meanwhile look dear.
    """
    return time.thread_time if device == "cpu" and threads == 1 else time.perf_counter


def measure(runner: Runner, config: ModelConfig, costs: LaneCosts, clock: Clock) -> None:
    """Tell `costs` of decoding passes of 1 to 32 sequences in both lanes, and of one window."""
    length = min(_CONTEXT, config.max_position)
    for count in _SEQUENCES:
        costs.observe("fast", count, _seconds(runner, "fast", [_span(_decode(length), length - 1, 1)] * count, clock))
        costs.observe("fixed", count, _seconds(runner, "fixed", [_span(_verify(length), length - 1, 1)] * count, clock))
    rows = min(costs.window, length)
    costs.observe("window", rows, _seconds(runner, "fixed", [_span(_verify(length), length - rows, rows)], clock))


def _seconds(runner: Runner, lane: Lane, spans: list[Span], clock: Clock) -> float:
    """The faster of two passes: the first one may still be touching memory for the first time."""
    times = []
    for _ in range(2):
        started = clock()
        runner.run(Pass(lane, spans))
        times.append(clock() - started)
    return min(times)


def _decode(length: int) -> Task:
    return _leased(DecodeTask([0] * length, 1, Sampling(temperature=0.0), frozenset(), top=0, is_draft=True))


def _verify(length: int) -> Task:
    return _leased(VerifyTask([0] * length, [], Sampling(temperature=0.0), frozenset(), top=0))


def _leased(task: Task) -> Task:
    blocks = list(range(RESERVED_BLOCKS, RESERVED_BLOCKS + MEASURE_BLOCKS))
    task.lease = Lease(blocks, cached=0, fixed=0, fresh=[], copy=None, shared=[])
    return task


def _span(task: Task, start: int, count: int) -> Span:
    return Span(task, start, count, choices=count)
