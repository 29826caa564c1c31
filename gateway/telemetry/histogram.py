"""A histogram as Prometheus counts one, in plain numbers.

Not the client library's: that one locks and searches its buckets one by one, which is most of what a request's metrics
would cost. All of the gateway counts in one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts values by the first of the ascending `bounds` that is not below them, and those above all."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"<Histogram count={self.count} sum={self.sum:g}>"

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """How many values were no greater than each bound, as Prometheus names bounds."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(map(float, self._counts)), strict=True))

    def quantile(self, share: float) -> float | None:
        """An estimate, by the straight line within a bucket; None without values. Above all bounds, the last bound."""
        target, below, floor = share * self.count, 0, 0.0
        if not self.count:
            return None
        for bound, count in zip(self.bounds, self._counts, strict=False):
            if count and below + count >= target:
                return floor + (bound - floor) * (target - below) / count
            below, floor = below + count, bound
        return self.bounds[-1]
