"""Finds the backends of each model and learns from them what they serve.

Owns the order of the start. A model can be served once one of its backends is ready; the first in the configured order
that is ready then decides the fingerprint, unless the configuration names one. Those that come later join if they have
the same one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import msgspec

from backend.protocol import PROTOCOL_VERSION
from gateway.admission import Admission
from gateway.backends.client import BackendClient
from gateway.backends.replica import Replica
from gateway.backends.replica_group import ReplicaGroup
from gateway.backends.upstream import UpstreamGroup
from gateway.backends.upstream_drafter import UpstreamDrafter
from gateway.commit_log.commit_log import CommitLog
from gateway.errors import StartError
from gateway.http.client import HttpClient
from gateway.limits.limiter import Limiter
from gateway.models import Model, Models
from gateway.models_file import Drafts, ModelConfig
from gateway.service import Service
from gateway.settings import Settings
from gateway.text.model_text import load_text

READY_POLL_S = 0.2
SAY_AFTER_S = 10.0
"""How long nothing is said of a backend that is waited for: one that starts beside the gateway needs its time."""

log = logging.getLogger(__name__)


async def connect(
    http: HttpClient,
    configs: Sequence[ModelConfig],
    settings: Settings,
    draw_seed: Callable[[], int],
    limiter: Limiter,
    commit_log: CommitLog,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Models:
    """Wait for the backends of all models; raises `StartError`. `sleep` is for the pauses before retries."""
    admission = Admission(settings.max_concurrent, settings.answer_timeout_s)

    async def open_model(config: ModelConfig) -> Model:
        upstreams = UpstreamGroup(http, config.upstreams) if config.upstreams else None
        if not config.backends:
            assert config.name is not None
            return Model(config.name, upstreams=upstreams)
        replicas = [
            Replica(BackendClient(http, url, settings.call_timeout_s, settings.health_timeout_s))
            for url in config.backends
        ]
        first = await _first_ready(replicas, config.fingerprint, settings.start_timeout_s)
        info = first.info
        assert info is not None
        model = config.name or info.model
        text = load_text(await first.client.tokenizer(), datetime.now)
        drafter = None
        if config.drafts is Drafts.UPSTREAMS:
            assert upstreams is not None
            drafter = UpstreamDrafter(upstreams, model, text, settings.call_timeout_s)
        group = ReplicaGroup(model, info, replicas, sleep, drafter)
        await asyncio.gather(*(group.check(replica) for replica in replicas if replica is not first))
        served = msgspec.structs.replace(info, model=model)
        return Model(model, Service(group, served, text, admission, limiter, commit_log, draw_seed), group, upstreams)

    return Models(await asyncio.gather(*map(open_model, configs)), admission)


async def _first_ready(replicas: Sequence[Replica], fingerprint: str | None, timeout_s: float) -> Replica:
    now = asyncio.get_running_loop().time
    say_at = now() + min(SAY_AFTER_S, timeout_s / 2)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                await asyncio.gather(*(replica.check(fingerprint) for replica in replicas))
                if ready := next((replica for replica in replicas if replica.belongs), None):
                    return ready
                if any(replica.info is not None and replica.info.protocol != PROTOCOL_VERSION for replica in replicas):
                    raise StartError(_say(replicas))
                if now() >= say_at:
                    say_at = math.inf
                    log.warning("waiting for a backend to be ready: %s", _say(replicas))
                await asyncio.sleep(READY_POLL_S)
    except TimeoutError as error:
        raise StartError(f"no backend is ready after {timeout_s:g} s: {_say(replicas)}") from error


def _say(replicas: Sequence[Replica]) -> str:
    return "; ".join(f"{replica.client.url}: {replica.trouble}" for replica in replicas)
