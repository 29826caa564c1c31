"""Throws logs away, in Redis and in the memory of every gateway that shares it.

A purge is announced in a stream in Redis, which every gateway looks at once a second, so that reading a log costs
nothing for it. Who has read of it forgets the logs, and does without them until the purge is over, which is announced
too: what Redis holds is deleted in between, when nobody can put it back, nor take it out once more.

A gateway that cannot reach Redis keeps what it remembers until it can again, then catches up. Requests that were under
way run on, and leave nothing in a log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from gateway.commit_log.redis import key_of, log_name
from gateway.commit_log.selection import Selection
from gateway.redis_connection import RedisConnection, StoreUnavailable

STREAM = "verbatim:purges"
_FIELD, _DONE = "selection", "done"
KEPT = 1000
"""Announcements kept, for gateways that were away."""
LOOK_EVERY_S = 1.0
LONGEST_S = 120.0
"""After so long a purge is over that nobody has said to be: whoever announced it is gone."""
SCAN_COUNT = 1000
"""Names that Redis looks at in one call: it is held up for half a millisecond."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Purged:
    """How many logs went, out of this gateway's memory and out of the shared store; None where there is none."""

    memory: int
    shared: int | None


Forget: TypeAlias = Callable[[Selection], int]
"""Forgets the selected logs in this process; how many."""


class Purges:
    """Purges of the logs in one process and, where there is one, one Redis."""

    def __init__(self, forget: Forget, connection: RedisConnection | None, look_every_s: float = LOOK_EVERY_S) -> None:
        self._forget = forget
        self._connection = connection
        self._look_every_s = look_every_s
        self._seen: bytes | None = None
        self._under_way: dict[bytes, tuple[float, Selection]] = {}
        """By the announcement's id, with the time at which each is over in any case."""
        self._looking = asyncio.Lock()
        self._began = time.monotonic()

    def __repr__(self) -> str:
        return f"<Purges seen={self._seen!r} under_way={len(self._under_way)}>"

    def concern(self, key: bytes) -> bool:
        """Whether a log is being purged, and so not to be read, nor written."""
        if not self._under_way:
            return False
        now = time.monotonic()
        return any(until > now and selects(key) for until, selects in self._under_way.values())

    async def watch(self) -> None:
        """Do what others announce, for as long as the gateway runs."""
        hears = True
        while self._connection is not None:
            try:
                await self.catch_up(self._connection)
                hears = True
            except StoreUnavailable as error:
                if hears:  # said once, not for every look
                    log.error("purges are not heard of (%s): what others purge still stands in this memory", error)
                hears = False
            await asyncio.sleep(self._look_every_s)

    async def catch_up(self, connection: RedisConnection) -> None:
        """Do what was announced since the last look; raises `StoreUnavailable`."""
        async with self._looking:
            seen: bytes = self._seen or await self._before(connection)
            async with connection.answering():
                announced: Any = await connection.redis.xrange(STREAM, min=b"(" + seen, max="+")
            now = time.monotonic()
            for id_, fields in announced:
                if _DONE.encode() in fields:
                    self._under_way.pop(fields[_DONE.encode()], None)
                else:
                    selection = _read(fields)
                    self._under_way[id_] = (now + LONGEST_S, selection)
                    self._forget(selection)
                seen = id_
            self._seen = seen
            self._under_way = {id_: one for id_, one in self._under_way.items() if one[0] > now}

    async def purge(self, selection: Selection) -> Purged:
        """Throw the selected logs away; raises `StoreUnavailable` where that is known of this memory alone."""
        memory = self._forget(selection)
        if self._connection is None:
            return Purged(memory, None)
        connection = self._connection
        purge = await self._announce(connection, _FIELD, msgspec.json.encode(selection))
        await self.catch_up(connection)
        await asyncio.sleep(2 * self._look_every_s)
        shared = 0
        async for names in self._scan(connection, log_name(selection.pattern)):
            if chosen := [name for name in names if selection(key_of(name))]:
                async with connection.answering():
                    shared += await connection.redis.unlink(*chosen)
        await self._announce(connection, _DONE, purge)
        await self.catch_up(connection)
        return Purged(memory, shared)

    async def _announce(self, connection: RedisConnection, field: str, value: bytes) -> bytes:
        async with connection.answering():
            id_: Any = await connection.redis.xadd(STREAM, {field: value}, maxlen=KEPT, approximate=True)
        return bytes(id_)

    async def _before(self, connection: RedisConnection) -> bytes:
        """Where to begin to read: before all that may be under way, or was announced since this process began."""
        async with connection.answering():
            seconds, _ = await connection.redis.time()
        since = time.monotonic() - self._began + LONGEST_S
        return b"%d-0" % max(0, 1000 * (seconds - since))

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
