"""How many choices may be generated at a time, whether new ones are taken at all, and how long they may run on.

Owns the count of places taken, the draining flag and the deadlines of what is in flight. There is no waiting line: a
request that does not fit is refused before any work is done for it, and told when to come back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from gateway.errors import AnswerTimeout, Draining, Overloaded, RequestError
from policies.decision import Limits

RETRY_AFTER_S = "1"


class Admission:
    """Places for `capacity` choices, each for at most the time a whole answer may take."""

    def __init__(self, capacity: int, answer_timeout_s: float) -> None:
        self._capacity = capacity
        self._answer_timeout_s = answer_timeout_s
        self._expired = False
        self._taken = 0
        self._taken_by: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._deadlines: list[asyncio.Timeout] = []

    def __repr__(self) -> str:
        return f"<Admission {self._taken}/{self._capacity}{' draining' if self._draining else ''}>"

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def taken_by(self) -> Mapping[str, int]:
        """The places taken, by tenant."""
        return self._taken_by

    @property
    def draining(self) -> bool:
        return self._draining

    def places_for(self, share: float) -> int:
        """How many places a share is: one at least."""
        return max(1, int(share * self._capacity))

    def check(self, choices: int, limits: Limits, field: str) -> None:
        """Refuse what would never fit, however long its client waits; raises `RequestError` for `field`."""
        most = self.places_for(limits.queue_share)
        if limits.concurrency is not None:
            most = min(most, limits.concurrency.count)
        if choices > most:
            raise RequestError(
                f"{choices} completions are asked for at once; this gateway generates {most} at a time", param=field
            )

    @asynccontextmanager
    async def admit(self, choices: int, tenant: str, share: float) -> AsyncIterator[None]:
        """Hold places for `choices` of a tenant, which may hold that share of all places.

        Raises `Overloaded` or `Draining`; the work inside is cut short by `expire`, and with `AnswerTimeout` when its
        time is over.
        """
        if self._draining:
            raise Draining("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        if self._taken + choices > self._capacity:
            raise Overloaded(
                f"{self._taken} of {self._capacity} places are taken; this request needs {choices}",
                reason="places",
                retry_after_s=RETRY_AFTER_S,
            )
        theirs = self._taken_by[tenant]
        if theirs + choices > self.places_for(share):
            raise Overloaded(
                f"{theirs} of the {self.places_for(share)} places for {tenant} are taken; this request needs {choices}",
                reason="share",
                retry_after_s=RETRY_AFTER_S,
            )
        self._taken += choices
        self._taken_by[tenant] += choices
        self._idle.clear()
        deadline = asyncio.timeout(self._answer_timeout_s)
        self._deadlines.append(deadline)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            assert deadline.expired()  # every other timeout has been translated where it is set
            if not self._expired:
                raise AnswerTimeout(f"the answer took longer than {self._answer_timeout_s:g} s") from error
            raise Draining("the gateway shut down before the answer was complete") from error
        finally:
            self._deadlines.remove(deadline)
            self._taken -= choices
            self._taken_by[tenant] -= choices
            if self._taken_by[tenant] == 0:
                del self._taken_by[tenant]
            if self._taken == 0:
                self._idle.set()

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._draining = True

    def expire(self) -> None:
        """End what is still in flight, with an error that says why."""
        self._expired = True
        for deadline in self._deadlines:
            if not deadline.expired():  # What has run out of its time is ending already.
                deadline.reschedule(asyncio.get_running_loop().time())

    async def wait_idle(self) -> None:
        """Return once every place is free."""
        await self._idle.wait()
