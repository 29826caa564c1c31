"""Throws logs away, in Redis and in the memory of every gateway that shares it.

A purge is announced in a stream in Redis, which every gateway looks at once a second, so that reading a log costs
nothing for it. When all have had the time to let go, what Redis holds is deleted: in the other order a gateway that
goes on with a log that it remembers would put it back.

A gateway that cannot reach Redis keeps what it remembers until it can again, then catches up. A log that is being
generated meanwhile is one begun after the purge: it stands again, whole, with its next tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.redis import key_of, log_name
from gateway.commit_log.selection import Selection
from gateway.redis_connection import RedisConnection, StoreUnavailable

STREAM = "verbatim:purges"
_FIELD = "selection"
KEPT = 1000
"""Announcements kept, for gateways that were away."""
LOOK_EVERY_S = 1.0
SCAN_COUNT = 1000
"""Names that Redis looks at in one call: it is held up for half a millisecond."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Purged:
    """How many logs went, out of this gateway's memory and out of the shared store; None where there is none."""

    memory: int
    shared: int | None


class Purges:
    """Purges of the logs in one memory and, where there is one, one Redis."""

    def __init__(
        self, memory: MemoryLogs, connection: RedisConnection | None, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._memory = memory
        self._connection = connection
        self._look_every_s = look_every_s
        self._seen = "0-0"

    def __repr__(self) -> str:
        return f"<Purges seen={self._seen}>"

    async def watch(self) -> None:
        """Do what others announce, for as long as the gateway runs."""
        while self._connection is not None:
            with suppress(StoreUnavailable):  # said by the commit log; the next look may do better
                await self.catch_up(self._connection)
            await asyncio.sleep(self._look_every_s)

    async def catch_up(self, connection: RedisConnection) -> None:
        """Do what was announced since the last look; raises `StoreUnavailable`."""
        async with connection.answering():
            announced: Any = await connection.redis.xrange(STREAM, min=f"({self._seen}", max="+")
        for id_, fields in announced:
            self._memory.purge(_read(fields))
            self._seen = id_.decode()

    async def purge(self, selection: Selection) -> Purged:
        """Throw the selected logs away; raises `StoreUnavailable` where that is known of this memory alone."""
        memory = self._memory.purge(selection)
        if self._connection is None:
            return Purged(memory, None)
        connection = self._connection
        async with connection.answering():
            await connection.redis.xadd(STREAM, {_FIELD: msgspec.json.encode(selection)}, maxlen=KEPT, approximate=True)
        await asyncio.sleep(2 * self._look_every_s)
        shared = 0
        async for names in self._scan(connection, log_name(selection.pattern)):
            if chosen := [name for name in names if selection(key_of(name))]:
                async with connection.answering():
                    shared += await connection.redis.unlink(*chosen)
        return Purged(memory, shared)

    async def _scan(self, connection: RedisConnection, pattern: str) -> AsyncIterator[list[Any]]:
        cursor = 0
        while True:
            async with connection.answering():
                cursor, names = await connection.redis.scan(cursor, match=pattern, count=SCAN_COUNT)
            yield names
            if cursor == 0:
                return


def _read(announced: dict[bytes, bytes]) -> Selection:
    """The selection announced. One that cannot be read, of a later version perhaps, is taken for all logs."""
    try:
        return msgspec.json.decode(announced[_FIELD.encode()], type=Selection)
    except (KeyError, msgspec.DecodeError) as error:
        log.warning("a purge was announced that cannot be read (%s): all logs in memory are forgotten", error)
        return Selection()
