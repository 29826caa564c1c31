"""A closed loop of completions on an engine, a share of them verified: whenever one ends, the next begins.

The number in flight is constant. The first ones are of different lengths, so that later ones do not end together; when
as many have ended as are in flight, all of these are gone and the measurement begins. It covers a given number of
completions, so that each way of serving does the same work, however fast it is. Those that are verified together end
together: the measurement begins and ends behind all that ends with one pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from backend.engine.engine import Engine
from benchmarks.pass_log import PassLog, PassTimes
from benchmarks.traffic import Completion, News, Traffic, Way
from gateway.domain import Counts


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine: `verified_percent` of the completions are verified, spread evenly."""

    verified_percent: int
    in_flight: int
    new_tokens: int
    way: Way


@dataclass(slots=True)
class Tally:
    """What came out within the measured interval; `counts` are those of the verified completions that ended in it.

    `prompts` counts the completions whose first token came in it. `off_in_flight_s` and `in_flight_s` sum the time that
    completions were in flight. `passes` are by kind of row. `pace_s` is what some work that
    is always the same cost around the interval, where that was looked at (pace.py).
    """

    tokens: int = 0
    verified_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    pace_s: float = 1.0
    prompts: int = 0
    completions: int = 0
    verified_completions: int = 0
    off_in_flight_s: float = 0.0
    in_flight_s: float = 0.0
    counts: Counts = field(default_factory=Counts)
    passes: PassTimes = field(default_factory=dict)


class ClosedLoop:
    """Runs one load on one engine."""

    def __init__(self, engine: Engine, passes: PassLog, prompts: Iterator[list[int]], load: Load):
        self._passes = passes
        self._prompts = prompts
        self._load = load
        self._traffic = Traffic(engine, load.way)
        self._number = -load.in_flight
        self._answered: set[Completion] = set()
        """Those in flight whose first token has come."""

    def run(self, completions: int) -> Tally:
        """Measure until that many completions ended; what is in flight then is cancelled."""
        for slot in range(self._load.in_flight):
            self._begin(max(2, self._load.new_tokens * (slot + 1) // self._load.in_flight))
        warm_up = Tally()
        while warm_up.completions < self._load.in_flight or self._traffic.more_at_once():
            self._count(self._hear(), warm_up)
        tally = Tally()
        before = self._passes.snapshot()
        start, start_cpu = time.perf_counter(), time.process_time()
        last = start
        while tally.completions < completions or self._traffic.more_at_once():
            off = sum(not completion.verified for completion in self._traffic.in_flight)
            news = self._hear()
            now = time.perf_counter()
            tally.off_in_flight_s += off * (now - last)
            tally.in_flight_s += self._load.in_flight * (now - last)
            last = now
            self._count(news, tally)
        tally.wall_s, tally.cpu_s = last - start, time.process_time() - start_cpu
        tally.passes = self._passes.since(before)
        self._traffic.stop()
        return tally

    def _begin(self, count: int) -> None:
        # Number n is verified where the share of n + 1 completions, rounded, is one more than that of n.
        percent = self._load.verified_percent
        verified = ((self._number + 1) * percent + 50) // 100 > (self._number * percent + 50) // 100
        self._number += 1
        self._traffic.begin(next(self._prompts), count, verified=verified)

    def _hear(self) -> News:
        news = self._traffic.hear()
        assert news is not None
        if news.ended:
            self._begin(self._load.new_tokens)
        return news

    def _count(self, news: News, tally: Tally) -> None:
        tally.tokens += news.tokens
        if news.tokens and news.completion not in self._answered:
            self._answered.add(news.completion)
            tally.prompts += 1
        tally.verified_tokens += news.tokens if news.completion.verified else 0
        if news.ended:
            self._answered.discard(news.completion)
            tally.completions += 1
            tally.verified_completions += news.completion.verified
            tally.counts += news.completion.counts
