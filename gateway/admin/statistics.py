"""What an operator wants to know at a glance: the logs, the work, and who serves the models. Changes nothing."""

from __future__ import annotations

import asyncio

from gateway.backends.replica import Replica
from gateway.backends.upstream import Upstream
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.redis import RedisLogs
from gateway.models import Model, Models
from gateway.redis_connection import StoreUnavailable

Json = dict[str, object]


async def statistics(models: Models, commit_log: CommitLog) -> Json:
    """The state of this gateway and of the Redis that it shares, as JSON."""
    stores, admission = commit_log.stores, models.admission
    return {
        "logs": {
            "served": dict(commit_log.served),
            "in_flight": commit_log.flights,
            "conflicts": stores.conflicts,
            "memory": {"logs": len(stores.memory), "bytes": stores.memory.bytes, "max_bytes": stores.memory.max_bytes},
            "shared": None if stores.shared is None else await _shared(stores.shared),
        },
        "requests": {
            "choices_in_flight": sum(admission.taken_by.values()),
            "most_choices": admission.capacity,
            "by_tenant": dict(admission.taken_by),
            "draining": admission.draining,
        },
        "models": [_model(model) for model in models],
    }


async def _shared(logs: RedisLogs) -> Json:
    said: Json = {"breaker": logs.breaker_state, "unanswered": logs.unanswered, "damaged": logs.damaged}
    redis = logs.connection.redis
    try:
        async with logs.connection.answering():
            keys, memory = await redis.dbsize(), await redis.info("memory")
    except StoreUnavailable:
        return said | {"answers": False, "keys": None, "bytes": None, "max_bytes": None}
    # All that is in that Redis: its names are counted, to tell logs from others would mean to look at each.
    return said | {
        "answers": True,
        "keys": keys,
        "bytes": memory.get("used_memory"),
        "max_bytes": memory.get("maxmemory") or None,
    }


def _model(model: Model) -> Json:
    group = model.group
    return {
        "model": model.name,
        "fingerprint": None if group is None else group.fingerprint,
        "trouble": None if group is None else group.trouble,
        "replicas": [] if group is None else [_replica(replica) for replica in group.replicas],
        "upstreams": [] if model.upstreams is None else [_upstream(one) for one in model.upstreams.upstreams],
    }


def _replica(replica: Replica) -> Json:
    info = replica.info
    return {
        "url": replica.client.url,
        "roles": [] if info is None else list(info.roles),
        "fingerprint": None if info is None else info.fingerprint,
        "belongs": replica.belongs,
        "well": replica.well,
        "trouble": replica.trouble,
        "breaker": replica.breaker.state(_now()),
        "in_flight": replica.in_flight,
    }


def _upstream(upstream: Upstream) -> Json:
    return {
        "url": upstream.config.url,
        "breaker": upstream.breaker.state(_now()),
        "in_flight": upstream.in_flight,
    }


def _now() -> float:
    return asyncio.get_running_loop().time()
