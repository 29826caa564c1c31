"""What a store of limits is asked, and the arithmetic of a token bucket.

A bucket is one number: the moment at which it will be full again. Spending moves it on by the time the spent takes to
flow back; time does the rest. So an idle bucket needs no entry, and a bucket cannot be read half updated. This is the
generic cell rate algorithm (ATM Forum, Traffic Management 4.0), which is a token bucket written as a clock.

A cost above the bucket's capacity is let through when the bucket is full, and leaves it in debt: over time the rate
holds for costs of any size.

Places are leases with an end: a gateway that dies gives them back by not renewing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MS_PER_MINUTE = 60_000.0
SLACK_MS = 0.001
"""A bucket that lacks less than this is full enough: floating point rounds."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A cost to take from a bucket; a negative one is given back and never refused. `capacity` may be spent at once.

    `what` is the unit: requests or tokens.
    """

    key: str
    what: str
    cost: float
    per_minute: int
    capacity: float

    @property
    def cost_ms(self) -> float:
        """How long the cost takes to flow back."""
        return self.cost * MS_PER_MINUTE / self.per_minute

    @property
    def free_ms(self) -> float:
        """How far from full the bucket may be for the cost to be let through."""
        return max(0.0, self.capacity - self.cost) * MS_PER_MINUTE / self.per_minute


@dataclass(frozen=True, slots=True)
class Lease:
    """Places to hold in the set `key`, one for each of `ids`. Ids that hold one already are renewed."""

    key: str
    ids: tuple[str, ...]
    limit: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Taken:
    """All was taken, or nothing.

    `refused` is the index of the first charge that was refused, their number if the lease was, None if all was taken.
    `wait_ms` is how long to wait for what was refused. `until_full_ms` has how far each bucket is from full now.
    """

    refused: int | None
    wait_ms: float
    until_full_ms: tuple[float, ...]


class LimitStore(Protocol):
    """Keeps buckets and leases. Every method raises `StoreUnavailable`."""

    async def take(self, charges: Sequence[Charge], lease: Lease | None) -> Taken: ...

    async def give_back(self, charges: Sequence[Charge], lease: Lease | None) -> None: ...


LEASE_WAIT_MS = 1000.0
"""When a place becomes free nobody knows."""


def spend(full_at_ms: float, now_ms: float, charge: Charge) -> tuple[float, float]:
    """The bucket's next full moment if the charge is let through, and how long it has to wait for that, 0 if not."""
    behind_ms = max(0.0, full_at_ms - now_ms)
    wait_ms = behind_ms - charge.free_ms
    refused = charge.cost > 0 and wait_ms > SLACK_MS
    return now_ms + max(0.0, behind_ms + charge.cost_ms), wait_ms if refused else 0.0
