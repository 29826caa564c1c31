"""Where an engine's time goes: seconds, rows and passes by kind of row, noted as passes run.

A row is one position of one sequence. Prompts: rows computed for their KV. Decoding: the last row of a sequence, in
either lane. Windows: a draft's rows, verified together. A pass of more than one kind is split by rows. On a CPU the
seconds are those of the engine's thread, which computes by itself: others who use the machine do not show in them.
"""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

from backend.engine.engine import Engine
from backend.engine.scheduler import Pass, Span
from backend.engine.tasks import Scored, Unchosen, VerifyTask

Kind = Literal["fast prompt", "fixed prompt", "fast decode", "fixed decode", "window"]
PassTimes: TypeAlias = dict[Kind, tuple[float, int, float]]
"""Kind -> (seconds, rows, passes)."""


class PassLog:
    """Listens to one engine from now on."""

    def __init__(self, engine: Engine):
        self._times: PassTimes = {}
        clock = time.thread_time if engine.info.device == "cpu" else time.perf_counter
        # The engine keeps no such record for itself; its runner is the one place that all passes go through.
        runner = engine._runner
        run = runner.run

        def timed(work: Pass) -> list[list[Scored | Unchosen]]:
            started = clock()
            chosen = run(work)
            self._note(work, clock() - started)
            return chosen

        runner.run = timed  # type: ignore[method-assign]

    def snapshot(self) -> PassTimes:
        """What was noted so far."""
        return dict(self._times)

    def since(self, before: PassTimes) -> PassTimes:
        """What was noted after that snapshot."""
        nothing = (0.0, 0, 0.0)
        return {
            kind: (seconds - old[0], rows - old[1], passes - old[2])
            for kind, (seconds, rows, passes) in self._times.items()
            for old in (before.get(kind, nothing),)
        }

    def _note(self, work: Pass, seconds: float) -> None:
        total = sum(span.count for span in work.spans)
        for span in work.spans:
            kind, part = _kind(work, span), span.count / total
            before = self._times.get(kind, (0.0, 0, 0.0))
            self._times[kind] = (before[0] + seconds * part, before[1] + span.count, before[2] + part)


def _kind(work: Pass, span: Span) -> Kind:
    if span.count == 1:
        return "fast decode" if work.lane == "fast" else "fixed decode"
    if isinstance(span.task, VerifyTask) and span.task.draft and span.choices > 1:
        return "window"
    return "fast prompt" if work.lane == "fast" else "fixed prompt"
