"""The limits of one request: what it takes when it comes, what it turns out to need, what it gives back.

Owns the names of buckets and what becomes of a request while nobody can count. A request and its places are taken
first; tokens once those of the prompt are counted, and then all that the request may come to use: what it did not use
is given back when it ends.

Places are leases, renewed while their request runs. If that fails for long enough others are let in; the request that
holds them goes on.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from gateway.errors import LimitsUnavailable
from gateway.limits.headers import rate_headers, refusal
from gateway.limits.store import Charge, Lease, LimitStore, Taken
from gateway.redis_connection import StoreUnavailable
from policies.decision import Limits, Rate
from policies.document import Unavailable

LEASE_TTL_S = 30.0
RENEW_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Limiter:
    """Takes and gives back on behalf of requests. `unanswered` counts the calls that the store did not answer."""

    def __init__(
        self, store: LimitStore, lease_ttl_s: float = LEASE_TTL_S, renew_every_s: float = RENEW_EVERY_S
    ) -> None:
        self._store = store
        self._lease_ttl_ms = int(lease_ttl_s * 1000)
        self._renew_every_s = renew_every_s
        self._answers = True
        self.unanswered = 0

    def __repr__(self) -> str:
        return f"<Limiter over {self._store!r} unanswered={self.unanswered}>"

    @asynccontextmanager
    async def admit(self, tenant: str, limits: Limits, places: int, word: Unavailable) -> AsyncIterator[Grant]:
        """Count one request that generates `places` choices, to the end of the context.

        Raises `RateLimited`, or `LimitsUnavailable` where the store does not answer and the policy's word is to deny.
        """
        lease = self._lease(tenant, limits, places)
        grant = Grant(self, tenant, limits, word)
        charges = [] if limits.requests is None else [_charge(tenant, "requests", limits.requests, 1)]
        try:
            await grant.take(charges, lease)
        except asyncio.CancelledError:
            await self._give_back([], lease)  # The store may have taken it all the same.
            raise
        renewing = None if lease is None else asyncio.create_task(self._renew(lease))
        try:
            yield grant
        finally:
            if renewing is not None:
                renewing.cancel()
            await self._give_back(grant.unused(), lease)

    def _lease(self, tenant: str, limits: Limits, places: int) -> Lease | None:
        if limits.concurrency is None:
            return None
        request = uuid.uuid4().hex
        ids = tuple(f"{request}:{index}" for index in range(places))
        key = _key(tenant, "places", limits.concurrency.scope)
        return Lease(key, ids, limits.concurrency.count, self._lease_ttl_ms)

    async def take(self, charges: Sequence[Charge], lease: Lease | None, word: Unavailable) -> Taken | None:
        """What the store says; None where it does not answer and the policy's word is to allow."""
        try:
            taken = await self._store.take(charges, lease)
        except StoreUnavailable as error:
            self._unanswered(error)
            if word is Unavailable.ALLOW:
                return None
            raise LimitsUnavailable("the limits cannot be counted now", retry_after_s="1") from error
        if not self._answers:
            self._answers = True
            log.warning("limits are counted again")
        return taken

    async def _give_back(self, charges: Sequence[Charge], lease: Lease | None) -> None:
        if charges or lease is not None:
            await _to_its_end(self._return(charges, lease))

    async def _return(self, charges: Sequence[Charge], lease: Lease | None) -> None:
        try:
            await self._store.give_back(charges, lease)
        except StoreUnavailable as error:
            # The lease ends by itself; what was held too much flows back within its minute.
            self._unanswered(error)

    async def _renew(self, lease: Lease) -> None:
        # The limit may have been lowered meanwhile: who is in stays in.
        lease = replace(lease, limit=2**31)
        while True:
            await asyncio.sleep(self._renew_every_s)
            try:
                await self._store.take([], lease)
            except StoreUnavailable as error:
                self._unanswered(error)

    def _unanswered(self, error: StoreUnavailable) -> None:
        self.unanswered += 1
        if self._answers:  # said once, not for every request of an outage
            self._answers = False
            log.error("limits cannot be counted (%s); the policy's word holds until they can", error)


class Grant:
    """What one request holds. `headers` tell its client where it stands."""

    def __init__(self, limiter: Limiter, tenant: str, limits: Limits, word: Unavailable) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._limits = limits
        self._word = word
        self._held: Charge | None = None
        self._used = 0
        self.headers: dict[str, str] = {}

    def __repr__(self) -> str:
        held = "no tokens" if self._held is None else f"{self._used} of {self._held.cost:g} tokens used"
        return f"<Grant to {self._tenant}: {held}>"

    async def take_tokens(self, prompt: int, answer: int) -> None:
        """Hold the prompt's tokens and the most the answer may have; raises as `Limiter.admit` does."""
        if self._limits.tokens is not None:
            charge = _charge(self._tenant, "tokens", self._limits.tokens, prompt + answer)
            # Who leaves meanwhile gives back what was taken, and nothing where nothing was.
            await _to_its_end(self._hold(charge, prompt))

    async def _hold(self, charge: Charge, used: int) -> None:
        if await self.take([charge], None):
            self._held = charge
            self._used = used

    def use(self, tokens: int) -> None:
        """So many tokens of the answer have come."""
        self._used += tokens

    def unused(self) -> list[Charge]:
        """What is to be given back."""
        if self._held is None or self._used >= self._held.cost:
            return []
        return [replace(self._held, cost=self._used - self._held.cost)]

    async def take(self, charges: Sequence[Charge], lease: Lease | None) -> bool:
        """Whether the charges were taken, and not let pass uncounted."""
        if not charges and lease is None:
            return False
        taken = await self._limiter.take(charges, lease, self._word)
        if taken is None:
            return False
        for charge, until_full_ms in zip(charges, taken.until_full_ms, strict=True):
            self.headers |= rate_headers(charge, until_full_ms)
        if taken.refused is not None:
            raise refusal(charges, lease, taken, self.headers)
        return True


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await what the store is told, also where this task is cancelled meanwhile, as it then is behind it. A store has a
    deadline, so it ends soon."""
    working = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from working.exception()
    working.result()


def _charge(tenant: str, what: str, rate: Rate, cost: float) -> Charge:
    capacity = max(1.0, rate.per_minute / 60 * rate.burst_s)
    return Charge(_key(tenant, what, rate.scope), what, cost, rate.per_minute, capacity)


def _key(tenant: str, what: str, scope: str) -> str:
    """The name of a bucket. Braces keep all of a tenant's in one slot of a Redis cluster; a tenant's name has none."""
    return f"verbatim:{{{tenant}}}:{what}:{scope}"
