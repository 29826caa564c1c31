"""The machine's pace: what the same passes cost now, whoever else is using it.

CPU time does not count what others take of a core, but what they take of its caches, memory and clock. That comes and
goes within minutes, and makes a pass dearer by a tenth or two: as much as the ways of decoding differ. So a benchmark
that compares them times the same passes of mode off right before and right after each, and states times at one pace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from backend.engine.engine import Engine
from backend.engine.kv_pool import KvPool
from backend.engine.measure import MEASURE_BLOCKS, decoding_task
from backend.engine.runner import Runner
from backend.engine.scheduler import Pass, Span
from benchmarks.closed_loop import Tally

_PROMPT, _SEQUENCES, _DECODING = 256, 16, 4
_REPETITIONS = 3


class Pace:
    """Passes of mode off over an engine's weights, with a KV of their own; the engine must be idle meanwhile."""

    def __init__(self, engine: Engine) -> None:
        runner = engine._runner
        model = runner._model
        kv = KvPool(model.config, model.dtype, MEASURE_BLOCKS, model.device)
        self._runner = Runner(model, kv, runner.ops("fast"), runner.ops("fixed"), runner._shape)
        task = decoding_task(_PROMPT)
        self._prompt = Pass("fast", [Span(task, 0, _PROMPT, 1)])
        self._decoding = Pass("fast", [Span(task, _PROMPT - 1, 1, 1)] * _SEQUENCES)

    def seconds(self) -> float:
        """CPU seconds of a prompt of 256 tokens and of four tokens for each of 16 sequences."""
        return median(self._once() for _ in range(_REPETITIONS))

    def _once(self) -> float:
        started = time.thread_time()
        for work in (self._prompt, *[self._decoding] * _DECODING):
            self._runner.run(work)
        return time.thread_time() - started


def level(runs: Sequence[Tally]) -> None:
    """State the times of all runs, which have looked at the pace, at the median of their paces."""
    usual = median(run.pace_s for run in runs)
    for run in runs:
        factor = usual / run.pace_s
        run.wall_s *= factor
        run.cpu_s *= factor
        run.off_in_flight_s *= factor
        run.in_flight_s *= factor
        run.passes = {kind: (seconds * factor, rows, tasks) for kind, (seconds, rows, tasks) in run.passes.items()}
