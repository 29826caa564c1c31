"""`GET /metrics`: what the gateway has done and how it is, in Prometheus's text format. docs/metrics.md says what each
metric means.

Everything is looked up when it is asked for: those who serve requests count plain numbers. Labels take their values
from configuration, never from a request.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from gateway.admin.access import AdminAccess
from gateway.commit_log.commit_log import CommitLog
from gateway.limits.limiter import Limiter
from gateway.models import Models
from gateway.receipts.notary import Notary
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.traffic import Outcome, Traffic, Way
from policies.policy_file import PolicyFile

_PREFIX = "verbatim_gateway_"


class Metrics:
    """One gateway, as Prometheus's library collects it."""

    def __init__(
        self,
        traffic: Traffic,
        models: Models,
        commit_log: CommitLog,
        notary: Notary,
        limiter: Limiter,
        policies: object,
    ) -> None:
        self._traffic = traffic
        self._models = models
        self._commit_log = commit_log
        self._notary = notary
        self._limiter = limiter
        self._policies = policies

    def collect(self) -> Iterator[Metric]:
        build = {(version("verbatim"), platform.python_version()): 1.0}
        yield _gauge("build_info", "What runs.", ("version", "python"), build)
        yield from self._requests()
        yield from self._work()
        yield from self._log()
        yield from self._receipts()
        yield from self._places()
        yield from self._backends()
        yield from self._upstreams()
        yield from self._policy()

    def _requests(self) -> Iterator[Metric]:
        traffic = self._traffic
        yield _counter("requests", "Requests that ended.", Outcome._fields, traffic.requests)
        yield _gauge("requests_in_flight", "Requests being served.", (), {(): traffic.in_flight})
        yield _counter("tokens", "Tokens of prompts and answers.", ("model", "mode", "tenant", "kind"), traffic.tokens)
        yield _counter("refusals", "Requests refused for want of room.", ("tenant", "reason"), traffic.refusals)
        yield _histogram("request_seconds", "From a request's coming to its end.", Way._fields, traffic.durations)
        yield _histogram("first_token_seconds", "Until the first token is there.", Way._fields, traffic.first_tokens)
        yield _histogram(
            "time_per_output_token_seconds",
            "Between tokens, the mean of each answer.",
            Way._fields,
            traffic.between_tokens,
        )
        yield _histogram("loop_lag_seconds", "How late the event loop is.", (), {(): traffic.loop_lag})
        yield _histogram("own_seconds", "Of a request, without what others took.", Way._fields, traffic.own)

    def _work(self) -> Iterator[Metric]:
        works = [(model.name, model.service.work) for model in self._models if model.service is not None]
        windows = {(name, outcome): count for name, work in works for outcome, count in work.windows.items()}
        yield _counter("windows", "Verify and decode calls that committed tokens.", ("model", "outcome"), windows)
        drafted = {(name, outcome): count for name, work in works for outcome, count in work.drafted.items()}
        yield _counter("drafted_tokens", "Drafted tokens that were verified.", ("model", "outcome"), drafted)
        committed = {(name, source): count for name, work in works for source, count in work.committed.items()}
        yield _counter("committed_tokens", "Tokens of verified answers.", ("model", "source"), committed)
        positions = {(name,): work.rolled_back_at for name, work in works}
        yield _histogram("rollback_position_tokens", "Where in answers drafts fell.", ("model",), positions)

    def _log(self) -> Iterator[Metric]:
        stores, shared = self._commit_log.stores, self._commit_log.stores.shared
        yield _counter("log_readings", "Readings of the commit log.", ("source",), self._commit_log.served)
        yield _counter("log_conflicts", "Tokens that contradicted what stood.", (), {(): stores.conflicts})
        yield _gauge("log_flights", "Logs being read or gone on with.", (), {(): self._commit_log.flights})
        yield _gauge("log_memory_logs", "Logs in memory.", (), {(): len(stores.memory)})
        yield _gauge("log_memory_bytes", "What they take.", (), {(): stores.memory.bytes})
        unanswered = {"limits": self._limiter.unanswered}
        if shared is not None:
            unanswered["log"] = shared.unanswered
            yield _counter("log_damaged", "Logs in Redis that were cut off.", (), {(): shared.damaged})
            yield _counter("log_foreign", "Looks at logs that only others can read.", (), {(): shared.foreign})
        yield _counter("store_unanswered", "Calls that Redis did not answer.", ("store",), unanswered)

    def _receipts(self) -> Iterator[Metric]:
        notary = self._notary
        yield _counter("receipts", "Receipts made, by what became of them.", ("outcome",), notary.counts)
        yield _counter("receipts_evicted", "Receipts that went before their time.", (), {(): notary.memory.evicted})
        yield _gauge("receipt_memory_bytes", "What receipts take in memory.", (), {(): notary.memory.bytes})
        yield _counter("receipt_key_refusals", "Changes of the keys not taken.", (), {(): notary.keys.failures})

    def _places(self) -> Iterator[Metric]:
        admission = self._models.admission
        yield _gauge("places", "Choices that may be generated at a time.", (), {(): admission.capacity})
        yield _gauge("places_taken", "Choices being generated.", ("tenant",), admission.taken_by)
        yield _gauge("draining", "Whether new requests are refused.", (), {(): admission.draining})

    def _backends(self) -> Iterator[Metric]:
        now = asyncio.get_running_loop().time()
        labels = ("model", "replica")
        replicas = {(group.model, r.client.url): r for group in self._models.groups for r in group.replicas}
        fingerprints = {(group.model, group.fingerprint): 1.0 for group in self._models.groups}
        yield _gauge("fingerprint_info", "What verified answers depend on.", ("model", "fingerprint"), fingerprints)
        yield _gauge("replica_up", "Whether it can be asked.", labels, {key: r.well for key, r in replicas.items()})
        calls = {key: r.in_flight for key, r in replicas.items()}
        yield _gauge("replica_calls", "Calls in flight on it.", labels, calls)
        quarantined = {key: r.quarantined for key, r in replicas.items()}
        yield _gauge("replica_quarantined", "Whether it contradicted what stands.", labels, quarantined)
        states = {(*key, r.breaker.state(now)): 1.0 for key, r in replicas.items()}
        yield _gauge("replica_breaker", "The state of its circuit breaker.", (*labels, "state"), states)

    def _upstreams(self) -> Iterator[Metric]:
        now = asyncio.get_running_loop().time()
        labels = ("model", "upstream")
        upstreams = {(name, u.config.url): u for name, group in self._models.upstreams.items() for u in group.upstreams}
        answers = {(*key, kind): n for key, u in upstreams.items() for kind, n in u.answers.items()}
        yield _counter("upstream_calls", "Calls handed on, by what came.", (*labels, "answer"), answers)
        calls = {key: u.in_flight for key, u in upstreams.items()}
        yield _gauge("upstream_calls_in_flight", "Calls in flight on it.", labels, calls)
        states = {(*key, u.breaker.state(now)): 1.0 for key, u in upstreams.items()}
        yield _gauge("upstream_breaker", "The state of its circuit breaker.", (*labels, "state"), states)

    def _policy(self) -> Iterator[Metric]:
        policies = self._policies
        if isinstance(policies, PolicyFile):
            reloads = {"taken": policies.reloads, "refused": policies.failures}
            yield _counter("policy_reloads", "Changes of the policy file.", ("outcome",), reloads)
            version_ = {(policies.current.version,): 1.0}
            yield _gauge("policy_info", "The policy in force.", ("version",), version_)


def build_metrics_router(access: AdminAccess, metrics: Metrics) -> APIRouter:
    """The route over a gateway's metrics and those of its process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    ProcessCollector(registry=registry)
    router = APIRouter()

    @router.get("/metrics")
    async def page(request: Request) -> Response:
        access.check(request.headers.get("authorization"))
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=media_type)

    return router


def _counter(name: str, said: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    return _filled(CounterMetricFamily(_PREFIX + name, said, labels=labels), values)


def _gauge(name: str, said: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    return _filled(GaugeMetricFamily(_PREFIX + name, said, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    """Keys of `values` are the label's value, or a tuple of them."""
    for labels, value in values.items():
        family.add_metric((labels,) if isinstance(labels, str) else labels, float(value))
    return family


def _histogram(name: str, said: str, labels: Sequence[str], values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, said, labels=labels)
    for key, histogram in values.items():
        family.add_metric(key, histogram.buckets(), histogram.sum)
    return family
