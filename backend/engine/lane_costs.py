"""What passes cost, and which of the two ways to a verified token is the cheaper one now.

A verified token can be drafted in the fast lane and verified in a window, or decoded in the fixed lane directly; both
give the same bits. Directly, every sequence that decodes rides in a pass of the fixed lane's arithmetic, which is a
little slower than the fast lane's. Drafted, each verified token costs a row of a window pass on top, and those rolled
back are drafted again. Few verified sequences among many favour drafts; many, or a fixed lane that is nearly as fast,
favour decoding.

What is compared is a small difference of costs, and one of the lanes is not in use. So costs are kept comparable: by
the number of rows and the length of the context, as measured at start, times the machine's pace now, which any pass
tells for all kinds of them. An average for each kind of what it cost last would be of other lengths and another load
for the kind that is idle: it would look cheap, be changed over to, and look dear again. What a pass costs beyond its
estimate is put down to the pace first, and to its kind slowly. Changing over costs passes, too: a way is kept until the
other one is cheaper by a margin.

Pure: it is told the times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Literal

Kind = Literal["fast", "fixed", "window"]
"""A decoding pass of either lane, one row a sequence; or the fixed lane's pass over windows."""

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

_PACE = 0.1  # Weights of a new observation: a dozen passes tell the pace,
_SKEW = 0.005  # some hundreds what is a kind's own.
_MOST = 1.0  # Of an observation's deviation counts no more than a factor of e.
_AGREEMENT = 0.1
_FADING = 0.01
_USUAL_AGREEMENT = 0.9
_MARGIN = 0.02


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a pass: `points` by its number of rows, with a context of `context` tokens.

    Each further token of context adds `per_token` seconds for each row.
    """

    points: Mapping[int, float]
    context: int
    per_token: float = 0.0

    def seconds(self, rows: int, context: float) -> float:
        """Between measured numbers of rows on a straight line, outside them in proportion, and never free."""
        points = sorted(self.points.items())
        at = bisect_left(points, (rows, 0.0))
        if at == len(points) or at == 0:
            nearest, cost = points[min(at, len(points) - 1)]
            cost *= max(rows / nearest, 1.0)
        else:
            (low, below), (high, above) = points[at - 1], points[at]
            cost = below + (above - below) * (rows - low) / (high - low)
        return max(cost + self.per_token * rows * (context - self.context), cost / 2)


class LaneCosts:
    """Estimates of what passes cost now, and of the drafts that agree."""

    def __init__(self, window: int, basis: Mapping[Kind, Curve] | Advice):
        """`basis` is what was measured at start; or the advice that holds whatever the costs, where there is one."""
        self.window = window
        self._settled = basis if isinstance(basis, Advice) else None
        self._curves: Mapping[Kind, Curve] = {} if isinstance(basis, Advice) else basis
        self._pace = 0.0  # Logarithms of factors.
        self._skew: dict[Kind, float] = {"fast": 0.0, "fixed": 0.0, "window": 0.0}
        self._agreed = _USUAL_AGREEMENT
        self._drafts = False

    def __repr__(self) -> str:
        factors = {kind: f"{exp(self._pace + skew):.2f}" for kind, skew in self._skew.items()}
        return f"<LaneCosts {dict(self._curves)} now={factors} agreed={self._agreed:.2f} drafts={self._drafts}>"

    def observe(self, kind: Kind, rows: int, context: float, seconds: float) -> None:
        """Note a pass of so many rows, with `context` tokens before each on average."""
        if self._settled is None:
            off = log(max(seconds, 1e-9) / self._cost(kind, rows, context))
            off = max(-_MOST, min(_MOST, off))
            self._pace += _PACE * off
            self._skew[kind] += _SKEW * off

    def observe_verdict(self, drafted: int, agreed: int) -> None:
        """Note how much of a draft agreed. Without drafts a bad memory of them fades, so that they are tried again."""
        if drafted:
            self._agreed += _AGREEMENT * (agreed / drafted - self._agreed)
        else:
            self._agreed += _FADING * (_USUAL_AGREEMENT - self._agreed)

    def advise(self, sequences: int, verified: int, context: float) -> Advice:
        """The cheaper way, with `verified` of `sequences` that decode now, of `context` tokens on average."""
        if self._settled is not None:
            return self._settled
        sequences, verified = max(sequences, 1), max(verified, 1)
        directly = self._cost("fixed", sequences, context) / sequences
        # While a window of W rows is drafted, in W - 1 passes, it brings the drafts that agree and a token besides.
        passes = max(self.window - 1, 1)
        tokens = sequences + verified * (self._agreed + 1 / passes - 1)
        verifying = self._cost("window", self.window, context) / passes * verified
        drafted = (self._cost("fast", sequences, context) + verifying) / tokens
        self._drafts = drafted * (1 - _MARGIN if self._drafts else 1 + _MARGIN) < directly
        return Advice(self._drafts, "cheaper")

    @property
    def seconds(self) -> dict[tuple[Kind, int], float]:
        """What is estimated now: seconds of a pass by its kind and its number of rows, for those measured at start."""
        return {
            (kind, rows): self._cost(kind, rows, curve.context)
            for kind, curve in self._curves.items()
            for rows in curve.points
        }

    def _cost(self, kind: Kind, rows: int, context: float) -> float:
        return self._curves[kind].seconds(rows, context) * exp(self._pace + self._skew[kind])
