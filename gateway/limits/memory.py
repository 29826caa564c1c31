"""Limits of one gateway, in its memory: for a gateway that has no Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.limits.store import LEASE_WAIT_MS, Charge, Lease, Taken, spend

SWEEP_AT = 1024
"""Buckets kept before those that are full again are dropped. Their number is bounded by the policy's rules."""


class MemoryStore:
    """Buckets and places in dicts. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_at_ms: dict[str, float] = {}
        self._leases: dict[str, set[str]] = {}

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._full_at_ms)} buckets, {sum(map(len, self._leases.values()))} places taken>"

    async def take(self, charges: Sequence[Charge], lease: Lease | None) -> Taken:
        now_ms = self._clock() * 1000
        spent = [spend(self._full_at_ms.get(charge.key, 0.0), now_ms, charge) for charge in charges]
        waits = [wait_ms for _, wait_ms in spent]
        if lease is not None:
            held = self._leases.get(lease.key, set())
            full = len(held | set(lease.ids)) > lease.limit
            waits.append(LEASE_WAIT_MS if full else 0.0)
        refused = next((index for index, wait_ms in enumerate(waits) if wait_ms > 0), None)
        if refused is not None:
            behind = [max(0.0, self._full_at_ms.get(charge.key, 0.0) - now_ms) for charge in charges]
            return Taken(refused, max(waits), tuple(behind))
        if len(self._full_at_ms) > SWEEP_AT:
            self._full_at_ms = {key: full_at for key, full_at in self._full_at_ms.items() if full_at > now_ms}
        for charge, (full_at_ms, _) in zip(charges, spent, strict=True):
            self._full_at_ms[charge.key] = full_at_ms
        if lease is not None:
            # Nothing here outlives the process, so nothing has to end by itself.
            self._leases.setdefault(lease.key, set()).update(lease.ids)
        return Taken(None, 0.0, tuple(full_at_ms - now_ms for full_at_ms, _ in spent))

    async def give_back(self, charges: Sequence[Charge], lease: Lease | None) -> None:
        await self.take(charges, None)
        if lease is not None:
            held = self._leases.get(lease.key, set())
            held.difference_update(lease.ids)
            if not held:
                self._leases.pop(lease.key, None)
