"""A circuit breaker as a state machine without clock: whether one replica is worth asking.

    closed ──failures in a row──▶ open ──after a while──▶ half open ──one success──▶ closed
                                   ▲                          │
                                   └───── its trial failed ───┘

Half open, one call at a time tries. Each opening lasts twice as long as the one before, up to a bound; a success makes
it short again. What counts as a failure of the replica, and not of the request, is the caller's to say.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

State: TypeAlias = Literal["closed", "open", "half_open"]

THRESHOLD = 3
FIRST_OPEN_S = 1.0
LONGEST_OPEN_S = 30.0


class Breaker:
    """Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_s = FIRST_OPEN_S
        self._open_until: float | None = None
        self._trying = False

    def __repr__(self) -> str:
        state = "closed" if self._open_until is None else f"open until {self._open_until:.1f}"
        return f"<Breaker {state} failures={self._failures}{' trying' if self._trying else ''}>"

    def state(self, now: float) -> State:
        """As the diagram above has it."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether a call may be made."""
        return self._open_until is None or (now >= self._open_until and not self._trying)

    def begin(self, now: float) -> None:
        """A call begins; it ends with one of the next three. One made although none is allowed is no trial."""
        if self._open_until is not None and self.allows(now):
            self._trying = True

    def succeeded(self) -> None:
        """The replica did its work."""
        self._failures = 0
        self._open_s = FIRST_OPEN_S
        self._open_until = None
        self._trying = False

    def settled(self) -> None:
        """A call ended that says nothing of the replica yet: it was cancelled, or it failed."""
        self._trying = False

    def failed(self, now: float) -> None:
        """The replica is at fault for a call that failed."""
        self._failures += 1
        if self._open_until is None:
            if self._failures >= THRESHOLD:
                self._open_until = now + self._open_s
        elif now >= self._open_until:
            # A trial, or a call from before the opening that took until now: it is no better yet.
            self._open_s = min(2 * self._open_s, LONGEST_OPEN_S)
            self._open_until = now + self._open_s
