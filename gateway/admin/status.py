"""`GET /admin/v1/status`: the statistics, and the sums that a dashboard makes rates of, in one look.

All sums count since the start, `up_s` seconds ago: who asks twice has the rates between. They are this gateway's alone.
Their labels come from configuration, so the answer is bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.admin.access import AdminAccess
from gateway.admin.routes import PREFIX
from gateway.admin.statistics import Json, statistics
from gateway.authentication import Policies
from gateway.commit_log.commit_log import CommitLog
from gateway.models import Models
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.traffic import Traffic
from gateway.telemetry.work import Work


class Status:
    """One gateway, as its dashboard sees it. `clock` counts seconds."""

    def __init__(
        self,
        traffic: Traffic,
        models: Models,
        policies: Policies,
        commit_log: CommitLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._traffic = traffic
        self._models = models
        self._policies = policies
        self._commit_log = commit_log
        self._clock = clock
        self._started_at = clock()

    async def look(self) -> Json:
        """The state as JSON."""
        traffic = self._traffic
        modes = sorted({way.mode for way in traffic.requests if way.mode})
        works = [model.service.work for model in self._models if model.service is not None]
        return {
            **await statistics(self._models, self._commit_log),
            "up_s": self._clock() - self._started_at,
            "policy": self._policies.current.version,
            "modes": {mode: _mode(traffic, mode) for mode in modes},
            "refusals": _sums((reason, count) for (_, reason), count in traffic.refusals.items()),
            "work": _work(works),
        }


def build_status_router(access: AdminAccess, status: Status) -> APIRouter:
    """The route over a gateway's status."""
    router = APIRouter(prefix=PREFIX)

    @router.get("/status")
    async def get_status(request: Request) -> Response:
        access.check(request.headers.get("authorization"))
        return JSONResponse(await status.look())

    return router


def _mode(traffic: Traffic, mode: str) -> Json:
    """The requests that were answered, or refused, in one mode."""
    requests = traffic.requests.items()
    tokens = traffic.tokens.items()
    return {
        "requests": _sums((outcome.status, count) for outcome, count in requests if outcome.mode == mode),
        "tokens": _sums((kind, count) for (_, of, _, kind), count in tokens if of == mode),
        "first_token_s": _histogram(found for way, found in traffic.first_tokens.items() if way.mode == mode),
        "between_tokens_s": _histogram(found for way, found in traffic.between_tokens.items() if way.mode == mode),
    }


def _work(works: list[Work]) -> Json:
    """What verified completions took, of all models."""
    return {
        "windows": _sums(item for work in works for item in work.windows.items()),
        "drafted": _sums(item for work in works for item in work.drafted.items()),
        "committed": _sums(item for work in works for item in work.committed.items()),
        "rolled_back_at": _histogram(work.rolled_back_at for work in works),
    }


def _sums(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, count in counts:
        total[name] += count
    return dict(total)


def _histogram(histograms: Iterable[Histogram]) -> Json | None:
    """Those of equal bounds, added up: how many values each bucket has, the last one for those above all bounds."""
    found = list(histograms)
    if not found:
        return None
    columns = zip(*(_counts(histogram) for histogram in found), strict=True)
    return {"bounds": list(found[0].bounds), "counts": [sum(column) for column in columns]}


def _counts(histogram: Histogram) -> list[int]:
    upto = [0, *(int(count) for _, count in histogram.buckets())]
    return [count - below for below, count in pairwise(upto)]
