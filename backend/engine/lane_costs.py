"""What passes cost, and which of the two ways to a verified token is the cheaper one now.

A verified token can be drafted in the fast lane and verified in a window, or decoded in the fixed lane directly; both
give the same bits. Directly, every sequence that decodes rides in a pass of the fixed lane's arithmetic, which is a
little slower than the fast lane's. Drafted, each verified token costs a row of a window pass on top, and those rolled
back are drafted again. Few verified sequences among many favour drafts; many, or a fixed lane that is nearly as fast,
favour decoding.

Costs are seconds of a pass by its number of rows, measured at start and kept current from the passes that run. Pure: it
is told the times.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

Kind = Literal["fast", "fixed", "window"]
"""A decoding pass of either lane, one row a sequence; or the fixed lane's pass over one window."""

Reason = Literal["cheaper", "fixed_shape", "lanes_coincide"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Which way the next window is to go: drafted and verified, or decoded in the fixed lane; and why."""

    drafts: bool
    reason: Reason


FIXED_SHAPE = Advice(drafts=True, reason="fixed_shape")
"""The fixed lane's bits depend on its shape, so decoding one token would take a whole G x W pass."""
LANES_COINCIDE = Advice(drafts=False, reason="lanes_coincide")
"""The fast lane's arithmetic is invariant itself: what it decodes stands as it is."""

_WEIGHT = 0.1  # Of a new observation: a dozen passes forget a disturbance.
_FADING = 0.01
_USUAL_AGREEMENT = 0.9
_MAX_ROWS = 256


class LaneCosts:
    """Moving averages of the seconds a pass takes, at powers of two of its rows, and of the drafts that agree."""

    def __init__(self, window: int, settled: Advice | None = None):
        """`settled` is the advice that holds whatever the costs, if there is one."""
        self.window = window
        self._settled = settled
        self._seconds: dict[Kind, dict[int, float]] = {"fast": {}, "fixed": {}, "window": {}}
        self._agreed = _USUAL_AGREEMENT

    def __repr__(self) -> str:
        return f"<LaneCosts {self._seconds} agreed={self._agreed:.2f}>"

    def observe(self, kind: Kind, rows: int, seconds: float) -> None:
        """Note a pass."""
        costs = self._seconds[kind]
        bucket = 1 << min(rows, _MAX_ROWS).bit_length() - 1
        scaled = seconds * bucket / rows if kind == "window" else seconds
        costs[bucket] = scaled if bucket not in costs else costs[bucket] + _WEIGHT * (scaled - costs[bucket])

    def observe_verdict(self, drafted: int, agreed: int) -> None:
        """Note how much of a draft agreed. Without drafts a bad memory of them fades, so that they are tried again."""
        if drafted:
            self._agreed += _WEIGHT * (agreed / drafted - self._agreed)
        else:
            self._agreed += _FADING * (_USUAL_AGREEMENT - self._agreed)

    def advise(self, sequences: int, verified: int) -> Advice:
        """The cheaper way, with `verified` of `sequences` that decode now."""
        if self._settled is not None:
            return self._settled
        sequences, verified = max(sequences, 1), max(verified, 1)
        directly = self._cost("fixed", sequences) - self._cost("fast", sequences)
        verifying = self._cost("window", self.window) / self.window * verified
        redrafting = self._cost("fast", sequences) * verified / sequences * (1 / max(self._agreed, 0.01) - 1)
        return Advice(verifying + redrafting < directly, "cheaper")

    @property
    def seconds(self) -> dict[tuple[Kind, int], float]:
        """What is known: seconds of a pass by its kind and its number of rows."""
        return {(kind, rows): cost for kind, costs in self._seconds.items() for rows, cost in dict(costs).items()}

    def _cost(self, kind: Kind, rows: int) -> float:
        """Seconds of a pass: between measured numbers of rows on a straight line, outside them in proportion."""
        points = sorted(self._seconds[kind].items())
        at = bisect_left(points, (rows, 0.0))
        if at == len(points) or at == 0:
            nearest, seconds = points[min(at, len(points) - 1)]
            return seconds * max(rows / nearest, 1.0)
        (low, below), (high, above) = points[at - 1], points[at]
        return below + (above - below) * (rows - low) / (high - low)
