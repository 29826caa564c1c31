"""How many choices may be generated at a time, and whether new ones are taken at all.

Owns the count of places taken and the draining flag. There is no waiting line: a request that does not fit is refused
before any work is done for it, and told when to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import Draining, Overloaded

RETRY_AFTER_S = "1"


class Admission:
    """Places for `capacity` choices."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._taken = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Admission {self._taken}/{self._capacity}{' draining' if self._draining else ''}>"

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def admit(self, choices: int) -> Iterator[None]:
        """Hold places for `choices`, or raise `Overloaded` or `Draining`."""
        if self._draining:
            raise Draining("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        if self._taken + choices > self._capacity:
            raise Overloaded(
                f"{self._taken} of {self._capacity} places are taken; this request needs {choices}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._taken += choices
        self._idle.clear()
        try:
            yield
        finally:
            self._taken -= choices
            if self._taken == 0:
                self._idle.set()

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return once every place is free."""
        await self._idle.wait()
