"""What the requests to this gateway came to: summed up once for each, when it has ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from gateway.telemetry.histogram import Histogram
from gateway.telemetry.record import Record

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
OWN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Outcome(NamedTuple):
    """The labels of a request. `status` is a class such as "2xx"; `code` the error's, empty where there was none."""

    model: str
    mode: str
    tenant: str
    route: str
    via: str
    status: str
    code: str


class Way(NamedTuple):
    """What times are told apart by."""

    model: str
    mode: str
    via: str


def _seconds() -> Histogram:
    return Histogram(SECONDS)


class Traffic:
    """Sums since the start. Times are those of requests that were answered without an error."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: Counter[Outcome] = Counter()
        self.tokens: Counter[tuple[str, str, str, str]] = Counter()
        """By model, mode, tenant, and "prompt" or "completion"."""
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By tenant and what refused."""
        self.durations: defaultdict[Way, Histogram] = defaultdict(_seconds)
        self.first_tokens: defaultdict[Way, Histogram] = defaultdict(_seconds)
        self.between_tokens: defaultdict[Way, Histogram] = defaultdict(lambda: Histogram(TOKEN_SECONDS))
        self.own: defaultdict[Way, Histogram] = defaultdict(lambda: Histogram(OWN_SECONDS))
        self.loop_lag = Histogram(OWN_SECONDS)

    def __repr__(self) -> str:
        return f"<Traffic {self.requests.total()} requests, {self.in_flight} in flight>"

    def add(self, record: Record) -> None:
        """Count a request that has ended."""
        status = f"{record.status // 100}xx"
        way = Way(record.model, record.mode, record.via)
        self.requests[Outcome(way.model, way.mode, record.tenant, record.route, way.via, status, record.code)] += 1
        if record.reason:
            self.refusals[record.tenant, record.reason] += 1
        if record.prompt_tokens:
            self.tokens[way.model, way.mode, record.tenant, "prompt"] += record.prompt_tokens
            self.tokens[way.model, way.mode, record.tenant, "completion"] += record.completion_tokens
        if record.code or not way.mode:
            return
        self.durations[way].observe(record.duration_s)
        if (own := record.own_s) is not None:
            self.own[way].observe(own)
        if record.first_at is not None:
            self.first_tokens[way].observe(record.first_at - record.began)
            steps = max(record.longest, record.events) - 1
            if steps > 0 and record.last_at > record.first_at:
                self.between_tokens[way].observe((record.last_at - record.first_at) / steps)
