"""Times a few passes of each lane at start, so that the engine knows its costs before the first call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from backend.engine.checkpoint import ModelConfig
from backend.engine.kv_pool import RESERVED_BLOCKS
from backend.engine.lane_costs import Curve, Kind
from backend.engine.prefix_cache import Lease
from backend.engine.runner import Runner
from backend.engine.scheduler import Lane, Pass, Span
from backend.engine.tasks import DecodeTask, Task, VerifyTask
from backend.kernels.attention import BLOCK
from backend.protocol import Sampling, VerifyShape

_SHORT, _LONG = 2 * BLOCK, 8 * BLOCK  # Tokens of context.
_SEQUENCES = (1, 2, 4, 8, 16, 32)
_USUAL = 16
MEASURE_BLOCKS = _LONG // BLOCK
"""Blocks of KV that the measurement needs. Its sequences share them: it is after the time alone."""


Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment."""


def pass_clock(device: str, threads: int) -> Clock:
    """The clock that tells what passes cost.

    Where one thread does all the work it is that thread's CPU time, which does not count what other processes take:
    they would make the lane that ran meanwhile look dear.
    """
    return time.thread_time if device == "cpu" and threads == 1 else time.perf_counter


def measure(runner: Runner, config: ModelConfig, shape: VerifyShape, clock: Clock) -> dict[Kind, Curve]:
    """Decoding passes of 1 to 32 sequences in both lanes, and windows: parts of one, one, and a group."""
    short, long = (min(tokens, config.max_position) for tokens in (_SHORT, _LONG))

    def decoding(lane: Lane, rows: int, length: int) -> float:
        task = decoding_task(length) if lane == "fast" else _verify(length)
        return _seconds(runner, lane, [_span(task, length - 1, 1)] * rows, clock)

    def windows(rows: int, length: int) -> float:
        """Of a group of windows as full as can be."""
        counts = [min(shape.window, rows - first, length) for first in range(0, rows, shape.window)]
        return _seconds(runner, "fixed", [_span(_verify(length), length - count, count) for count in counts], clock)

    def curve(cost: Callable[[int, int], float], sizes: Iterable[int], size: int) -> Curve:
        """`size` is the number of rows at which the length of the context is varied."""
        points = {rows: cost(rows, short) for rows in sizes}
        more = (cost(size, long) - points[size]) / (size * (long - short)) if long > short else 0.0
        return Curve(points, short, max(more, 0.0))

    whole, group = shape.window, shape.window * shape.groups
    return {
        "fast": curve(partial(decoding, "fast"), _SEQUENCES, _USUAL),
        "fixed": curve(partial(decoding, "fixed"), _SEQUENCES, _USUAL),
        "window": curve(windows, sorted({-(-whole // 4), whole, group}), whole),
    }


def _seconds(runner: Runner, lane: Lane, spans: list[Span], clock: Clock) -> float:
    """The faster of two passes: the first one may still be touching memory for the first time."""
    times = []
    for _ in range(2):
        started = clock()
        runner.run(Pass(lane, spans))
        times.append(clock() - started)
    return min(times)


def decoding_task(length: int) -> Task:
    """A sequence of so many tokens that decodes in the fast lane, in the first blocks of a pool of `MEASURE_BLOCKS`."""
    return _leased(DecodeTask([0] * length, 1, Sampling(temperature=0.0), frozenset(), top=0, is_draft=True))


def _verify(length: int) -> Task:
    return _leased(VerifyTask([0] * length, [], Sampling(temperature=0.0), frozenset(), top=0))


def _leased(task: Task) -> Task:
    blocks = list(range(RESERVED_BLOCKS, RESERVED_BLOCKS + MEASURE_BLOCKS))
    task.lease = Lease(blocks, cached=0, fixed=0, fresh=[], copy=None, shared=[])
    return task


def _span(task: Task, start: int, count: int) -> Span:
    return Span(task, start, count, choices=count)
