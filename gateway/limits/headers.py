"""Where a client stands, in OpenAI's words: `x-ratelimit-*`, Retry-After, and the refusal itself.

`remaining` is what may be spent now, which for a bucket that holds a second's worth is far less than the limit of a
minute; `reset` is when the bucket will be full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gateway.errors import RateLimited
from gateway.limits.store import MS_PER_MINUTE, Charge, Lease, Taken


def rate_headers(charge: Charge, until_full_ms: float) -> dict[str, str]:
    """The headers of one bucket."""
    remaining = charge.capacity - until_full_ms * charge.per_minute / MS_PER_MINUTE
    # What floating point leaves below a whole number counts as the number.
    return {
        f"x-ratelimit-limit-{charge.what}": str(charge.per_minute),
        f"x-ratelimit-remaining-{charge.what}": str(max(0, math.floor(remaining + 1e-6))),
        f"x-ratelimit-reset-{charge.what}": duration(until_full_ms),
    }


def refusal(charges: Sequence[Charge], lease: Lease | None, taken: Taken, headers: Mapping[str, str]) -> RateLimited:
    """The error for what was not taken."""
    assert taken.refused is not None
    retry_after_s = str(max(1, math.ceil(taken.wait_ms / 1000)))
    if taken.refused < len(charges):
        charge = charges[taken.refused]
        reason = charge.what
        said = f"the limit of {charge.per_minute} {charge.what} per minute is reached"
    else:
        assert lease is not None
        reason = "completions"
        said = f"the limit of {lease.limit} completions at a time is reached; this request needs {len(lease.ids)}"
    return RateLimited(said, reason=reason, retry_after_s=retry_after_s, headers=headers)


def duration(ms: float) -> str:
    """As OpenAI writes it: `12ms`, `1.5s`, `6m0s`."""
    if ms < 1000:
        return f"{math.ceil(ms)}ms"
    minutes, seconds = divmod(math.ceil(ms / 100) / 10, 60)
    return f"{minutes:g}m{seconds:g}s" if minutes else f"{seconds:g}s"
