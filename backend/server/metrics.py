"""`GET /metrics`: what the engine has done, in Prometheus's text format. docs/metrics.md says what each one means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from backend.engine.stats import Stats

MEDIA_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "verbatim_engine_"


def render(stats: Stats) -> bytes:
    """The metrics page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Look(stats))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """One look at the engine, as Prometheus's library collects it."""

    stats: Stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        yield _counter("passes", "Forward passes.", ("lane",), stats.passes)
        yield _counter("rows", "Rows of those passes.", ("lane",), stats.rows)
        yield _counter("pass_seconds", "Time spent in passes.", ("lane",), stats.seconds)
        yield _counter("tokens", "Tokens produced by calls that ended, by use.", ("use",), stats.tokens)
        windows = {"agreed": stats.windows - stats.rollbacks, "rolled_back": stats.rollbacks}
        yield _counter("windows", "Drafts verified, by outcome.", ("outcome",), windows)
        drafted = {"agreed": stats.drafted - stats.rolled_back, "rolled_back": stats.rolled_back}
        yield _counter("drafted_tokens", "Drafted tokens that were verified, by outcome.", ("outcome",), drafted)
        advice = {("draft" if key.drafts else "decode", key.reason): count for key, count in stats.advice.items()}
        yield _counter("advice", "Which way the next window was to go, and why.", ("way", "reason"), advice)
        costs = {(kind, str(rows)): seconds for (kind, rows), seconds in stats.pass_costs.items()}
        yield _gauge("pass_cost_seconds", "What a pass is estimated to take.", ("kind", "rows"), costs)
        yield _gauge("running", "Calls that hold KV memory.", (), {(): stats.running})
        yield _gauge("waiting", "Calls that wait for a place or memory.", (), {(): stats.waiting})
        used = {"available": stats.blocks_available, "in_use": stats.blocks - stats.blocks_available}
        yield _gauge("kv_blocks", "Blocks of the KV cache.", ("state",), used)
        yield _counter("kv_evictions", "Cached blocks that were evicted.", (), {(): stats.evictions})
        yield _counter("preemptions", "Streams that lost their memory for a while.", (), {(): stats.preemptions})


def _counter(name: str, said: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    return _filled(CounterMetricFamily(_PREFIX + name, said, labels=labels), values)


def _gauge(name: str, said: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    return _filled(GaugeMetricFamily(_PREFIX + name, said, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    """Keys of `values` are the label's value, or a tuple of them."""
    for labels, value in values.items():
        family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return family
