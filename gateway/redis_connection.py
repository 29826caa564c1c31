"""The gateway's connection to its Redis, for all that is kept there.

Owns the pool and the deadline. Every call has one deadline, connecting included. After it the answer is
`StoreUnavailable` and the connection is dropped, so that no later call can read this one's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.settings import REDIS_TIMEOUT_S

CONNECTIONS = 64


class StoreUnavailable(Exception):
    """The store did not answer in time, or not in order; nothing is known of what it did."""


class RedisConnection:
    """The Redis at a URL. The URL may hold a password and is never shown."""

    def __init__(self, url: str, deadline_s: float = REDIS_TIMEOUT_S) -> None:
        """Raises `ValueError` for what is no Redis URL."""
        self._deadline_s = deadline_s
        # One more try: a connection that idled may have been closed by the other side. No timeouts of the client's own:
        # it makes a task for each call to have one, and on Python 3.11 loses a cancellation that comes at its end.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=deadline_s,
            retry=Retry(NoBackoff(), 1),
            socket_timeout=None,
            socket_connect_timeout=None,
        )
        self.redis: Redis = Redis.from_pool(pool)

    def __repr__(self) -> str:
        return "<RedisConnection>"

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """One call, or a few that share a deadline; raises `StoreUnavailable` for whatever goes wrong with them."""
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(type(error).__name__) from error

    async def aclose(self) -> None:
        await self.redis.aclose()
