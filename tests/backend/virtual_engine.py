"""An engine whose passes take what a table says, on a clock of their own: what traffic costs, without noise.

The scheduler, its costs, admission and cache are the real ones. Chosen tokens are made up: the fast lane's differ from
the fixed lane's at random. What a call's end leads to reaches the engine one pass later, as it does where the caller
needs some time for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backend.engine.admission import Admission
from backend.engine.engine import Listener
from backend.engine.lane_costs import Curve, Kind, LaneCosts
from backend.engine.prefix_cache import PrefixCache
from backend.engine.scheduler import Limits, Pass, Scheduler
from backend.engine.tasks import DecodeTask, Scored, Task
from backend.protocol import PROTOCOL_VERSION, Info, VerifyShape
from benchmarks.closed_loop import Tally
from benchmarks.traffic import Traffic, Way

SHAPE = VerifyShape(groups=8, window=32)
_MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Machine:
    """What passes take: by kind, and per row of a prompt in either lane; `agreement` is that of one drafted token."""

    curves: Mapping[Kind, Curve]
    fast_prompt_s: float
    fixed_prompt_s: float
    agreement: float = 0.995

    def seconds(self, work: Pass) -> float:
        rows = sum(span.count for span in work.spans)
        context = sum(span.start + span.count for span in work.spans) / len(work.spans)
        if all(span.count == 1 for span in work.spans):
            return self.curves[work.lane].seconds(rows, context)
        if all(span.count <= SHAPE.window and span.choices == span.count for span in work.spans):
            return self.curves["window"].seconds(rows, context)
        return rows * (self.fast_prompt_s if work.lane == "fast" else self.fixed_prompt_s)


class VirtualEngine:
    """`expected` is what the engine believes at start; `noise` the part by which passes take more or less."""

    def __init__(self, machine: Machine, expected: Mapping[Kind, Curve], noise: float):
        self._machine = machine
        self._noise = noise
        self._random = random.Random(0)
        self._scheduler = Scheduler(
            Admission(PrefixCache(1000, 64, first=2), max_running=64, max_waiting=64),
            Limits(SHAPE, _MAX_CONTEXT, prefill_rows=256, group_wait=8),
            True,
            LaneCosts(SHAPE.window, expected),
        )
        self._arriving: dict[Task, Listener] = {}
        self._listeners: dict[Task, Listener] = {}
        self.time_s = 0.0
        self.info = Info(
            PROTOCOL_VERSION, "virtual", "v", ["draft", "verify", "decode"], SHAPE, _MAX_CONTEXT, 9, "float32", "cpu"
        )

    def submit(self, task: Task, listener: Listener) -> None:
        self._arriving[task] = listener

    def cancel(self, task: Task, done: Callable[[], None] = lambda: None) -> None:
        if self._arriving.pop(task, None) is None and self._listeners.pop(task, None) is not None:
            self._scheduler.end(task)
        done()

    def step(self) -> None:
        """Run a pass."""
        work = self._next_pass()
        self._let_in()
        work = work or self._next_pass()
        assert work is not None
        seconds = self._machine.seconds(work) * self._random.uniform(1 - self._noise, 1 + self._noise)
        self.time_s += seconds
        self._scheduler.observe(work, seconds)
        before = [len(span.task.produced) for span in work.spans]
        chosen = [[self._token(work) for _ in range(span.choices)] for span in work.spans]
        ended = self._scheduler.apply(work, chosen).ended
        for span, count in zip(work.spans, before, strict=True):
            listener = self._listeners.get(span.task)
            if listener is not None and isinstance(span.task, DecodeTask):
                listener.produced(span.task.produced[count:])
        for task in ended:
            self._listeners.pop(task).ended()

    def _next_pass(self) -> Pass | None:
        self._scheduler.admit()
        return self._scheduler.next_pass()

    def _let_in(self) -> None:
        for task, listener in self._arriving.items():
            self._scheduler.submit(task)
            self._listeners[task] = listener
        self._arriving.clear()

    def _token(self, work: Pass) -> Scored:
        wrong = work.lane == "fast" and self._random.random() > self._machine.agreement
        return Scored(8 if wrong else 7, 0.0, 0.0, [])


def closed_loop(
    engine: VirtualEngine, way: Way, percent: int, in_flight: int, prompt: int, output: int, completions: int
) -> Tally:
    """As benchmarks.closed_loop, in the engine's own time. Prompts have nothing in common."""
    traffic = Traffic(engine, way)
    begun, tally, answered, started_s = 0, Tally(), set[object](), 0.0

    def begin(count: int) -> None:
        nonlocal begun
        begun += 1
        verified = (begun * percent + 50) // 100 > ((begun - 1) * percent + 50) // 100
        traffic.begin([begun + 100, *[5] * (prompt - 1)], count, verified=verified)

    for slot in range(in_flight):
        begin(max(2, output * (slot + 1) // in_flight))
    warm = 2 * in_flight
    while tally.completions < warm + completions:
        news = traffic.hear(0)
        if news is None:
            engine.step()
            continue
        if news.tokens:
            tally.tokens += news.tokens
            tally.prompts += news.completion not in answered
            answered.add(news.completion)
        if news.ended:
            tally.completions += 1
            begin(output)
            if tally.completions == warm:
                tally.tokens, tally.prompts, started_s = 0, 0, engine.time_s
    tally.cpu_s = tally.wall_s = engine.time_s - started_s
    return tally


def misjudged(curves: Mapping[Kind, Curve], factors: Sequence[float]) -> dict[Kind, Curve]:
    """The curves with an error of their own for each kind."""
    return {
        kind: Curve({rows: cost * factor for rows, cost in curve.points.items()}, curve.context, curve.per_token)
        for (kind, curve), factor in zip(curves.items(), factors, strict=True)
    }
