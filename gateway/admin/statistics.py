"""What an operator wants to know at a glance: the logs, and who serves the models. Looks, and changes nothing."""

from __future__ import annotations

from gateway.commit_log.commit_log import CommitLog
from gateway.models import Models
from gateway.replica import Replica


def statistics(models: Models, commit_log: CommitLog) -> dict[str, object]:
    """The state of this gateway as JSON."""
    stores = commit_log.stores
    return {
        "logs": {
            "memory": {"logs": len(stores.memory), "bytes": stores.memory.bytes},
            "served": dict(commit_log.served),
            "conflicts": stores.conflicts,
        },
        "models": [
            {
                "model": group.model,
                "fingerprint": group.fingerprint,
                "trouble": group.trouble,
                "replicas": [_replica(replica) for replica in group.replicas],
            }
            for group in models.groups
        ],
    }


def _replica(replica: Replica) -> dict[str, object]:
    return {
        "url": replica.client.url,
        "fingerprint": None if replica.info is None else replica.info.fingerprint,
        "trouble": replica.trouble,
        "belongs": replica.belongs,
        "in_flight": replica.in_flight,
    }
