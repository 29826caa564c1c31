"""One backend among others that can stand in for it: how it is, and how much it has to do.

Owns what is known of the backend (its health, its fingerprint, its breaker) and the calls in flight on it, which end
early when it is given up. Knows nothing of the other replicas: who is asked is the group's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeVar

from backend.protocol import PROTOCOL_VERSION, Info, Role
from gateway.backends.client import BackendClient
from gateway.breaker import Breaker
from gateway.errors import BackendError, BackendFailed, BackendTimeout, RoleRefused

T = TypeVar("T")

STRIKES = 2
"""So many health checks in a row must go unanswered. One that is refused, or answered "not ready", is enough."""


class Replica:
    """The backend behind one client. `trouble` says what is wrong with it, None where nothing is.

    `belongs` says whether its answers are those of its group, as far as is known: with another fingerprint they are
    not, whatever its health.
    """

    def __init__(self, client: BackendClient) -> None:
        self.client = client
        self.info: Info | None = None
        self.trouble: str | None = "it has not answered yet"
        self.belongs = False
        self.in_flight = 0
        self.breaker = Breaker()
        self._quarantined = False
        self._strikes = 0
        self._deadlines: list[asyncio.Timeout] = []

    def __repr__(self) -> str:
        return f"<Replica {self.client.url} {self.trouble or 'well'} in_flight={self.in_flight} {self.breaker!r}>"

    def plays(self, role: Role) -> bool:
        """Whether its answers in this role count, be it well or not."""
        return self.belongs and self.info is not None and role in self.info.roles

    @property
    def well(self) -> bool:
        return self.trouble is None and self.breaker.allows(_now())

    @property
    def quarantined(self) -> bool:
        return self._quarantined

    async def check(self, fingerprint: str | None) -> None:
        """Ask how it is and who it is. `fingerprint` is the group's, None where any will do."""
        try:
            health = await self.client.health()
            info = await self.client.info() if health.status == "ready" else None
        except BackendTimeout:
            self._strikes += 1
            if self._strikes >= STRIKES:
                self.trouble = "it does not answer"
        except (BackendError, RoleRefused) as error:
            self.trouble = error.message
        else:
            self._strikes = 0
            if info is None:
                self.trouble = f"it is {health.status}, {health.loaded:.0%} done"
            else:
                self._learn(info, fingerprint)

    def _learn(self, info: Info, fingerprint: str | None) -> None:
        self.info = info
        # A backend that does not verify decides nothing, so its fingerprint may be any.
        if self._quarantined:
            self._leave("it contradicted tokens that stand")
        elif info.protocol != PROTOCOL_VERSION:
            self._leave(f"it speaks window protocol {info.protocol}, this gateway {PROTOCOL_VERSION}")
        elif fingerprint not in (None, info.fingerprint) and "verify" in info.roles:
            self.leave(info.fingerprint)
        else:
            self.belongs = True
            if self.trouble is not None:
                self.trouble = None
                self.breaker = Breaker()  # What it did before it was away does not count.

    def leave(self, fingerprint: str) -> None:
        """Its answers are no longer those of its group."""
        self._leave(f"its fingerprint is {fingerprint!r}")

    def quarantine(self) -> None:
        """Its answers are wrong, or one of its group's was, whatever it says of itself: for as long as this gateway
        runs it is not asked again."""
        self._quarantined = True
        self._leave("it contradicted tokens that stand")

    def _leave(self, why: str) -> None:
        self.belongs = False
        self.trouble = why

    def blame(self) -> None:
        """It is at fault for a call that failed: that never got here, or went well elsewhere."""
        self.breaker.failed(_now())

    def give_up(self) -> None:
        """End the calls in flight with an error, so that they can be made elsewhere."""
        deadlines, self._deadlines = self._deadlines, []
        for deadline in deadlines:
            deadline.reschedule(_now())

    async def call(self, perform: Callable[[BackendClient], Awaitable[T]]) -> T:
        """Make one call; raises `BackendError`."""
        with self._counted():
            async with self._unless_given_up():
                return await perform(self.client)

    async def iterate(self, perform: Callable[[BackendClient], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """Make one call that is answered piece by piece; raises `BackendError`."""
        with self._counted():
            async with aclosing(perform(self.client)) as pieces:
                while True:
                    # Piece by piece: a timeout that spanned a yield would strike in the consumer's code.
                    async with self._unless_given_up():
                        piece = await anext(pieces, None)
                    if piece is None:
                        return
                    yield piece

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        self.breaker.begin(_now())
        try:
            yield
        except BaseException:
            self.breaker.settled()
            raise
        else:
            self.breaker.succeeded()
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def _unless_given_up(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadlines.append(deadline)
                try:
                    yield
                finally:
                    if deadline in self._deadlines:
                        self._deadlines.remove(deadline)
        except TimeoutError as error:
            raise BackendFailed(f"the backend was given up: {self.trouble}") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
