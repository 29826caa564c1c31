"""What verified traffic would cost at best: the throughput that the measured costs of passes allow at each share.

The costs are seconds per row, as measured with full batches in the same run. A completion of mode off needs its prompt
and its tokens in the fast lane. A verified one needs its prompt in the fixed lane, and its tokens one of two ways:

- *drafted*: each token a row of fast decoding and a row of a window. Of W rows one needs no draft. All drafts agree.
- *direct*: each token a row of fixed decoding. While any verified completion is in flight, all of them decode so: it
  is one pass, and a pass over a full batch costs less a row than two passes over parts of it.

The bound is the better of the two; mixing them over time lies between. Nothing waits, no call costs anything beyond
what `other` holds, and no token is computed for nothing. An engine can beat the bound only where the measured costs
have moved between the cells of a run; how far it stays below is what scheduling has left to win.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Seconds for a row of each kind; `other` is the time outside passes, per token."""

    fast_prompt: float
    fixed_prompt: float
    fast_decode: float
    fixed_decode: float
    window: float
    other: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Throughput as a ratio to mode off, and the way that gives it."""

    ratio: float
    way: str


def bound(costs: RowCosts, prompt: int, output: int, in_flight: int, window: int, percent: int) -> Bound:
    """The bound for a workload with `percent` of its completions verified."""
    share = percent / 100
    meets_verified = min(1.0, share * in_flight)
    decode = output * (costs.fast_decode + costs.other)
    off = prompt * costs.fast_prompt + decode
    drafted = prompt * costs.fixed_prompt + decode + output * (costs.window - costs.fast_decode / window)
    direct = prompt * costs.fixed_prompt + output * (costs.fixed_decode + costs.other)
    riding = off + meets_verified * output * (costs.fixed_decode - costs.fast_decode)
    ways = {
        "drafted": (1 - share) * off + share * drafted,
        "direct": (1 - share) * riding + share * direct,
    }
    way = min(ways, key=lambda name: ways[name])
    return Bound(off / ways[way], way)
