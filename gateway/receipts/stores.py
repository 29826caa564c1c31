"""Where receipts are kept until their time is over: in this process's memory, or in a Redis that gateways share.

A receipt is found by a name made of its tenant and its id, so no look-up can forget to ask whose it is, and all of a
tenant's can be found by how their names begin. What is kept needs no check of its own: a receipt that was damaged or
forged is found out by its signature.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from gateway.breaker import Breaker
from gateway.receipts.sealing import ReceiptSealer
from gateway.redis_connection import RedisConnection, guarded

ENTRY_BYTES = 400
"""What an entry takes beside its bytes, at most; measured with tracemalloc on CPython 3.11."""


def name_of(tenant: str, id_: str) -> str:
    """The name under which a tenant's receipt is kept."""
    return f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}:{id_}"


class MemoryReceipts:
    """Receipts by name, the oldest of which go first. `evicted` counts those that went before their time.

    `clock` counts seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self.bytes = 0
        self.evicted = 0

    def __repr__(self) -> str:
        return f"<MemoryReceipts {len(self._kept)}, {self.bytes} of {self._max_bytes} bytes, evicted={self.evicted}>"

    def put(self, name: str, raw: bytes, ttl_s: float) -> bool:
        """Keep a receipt; whether there is room for it at all."""
        size = ENTRY_BYTES + len(raw)
        if size > self._max_bytes:
            return False
        now = self._clock()
        self._kept[name] = (now + ttl_s, raw)
        self.bytes += size
        while self.bytes > self._max_bytes:
            oldest = next(iter(self._kept))
            self.evicted += self._kept[oldest][0] > now
            self._drop(oldest)
        return True

    def get(self, name: str) -> bytes | None:
        expires_at, raw = self._kept.get(name, (0.0, None))
        if raw is not None and expires_at <= self._clock():
            self._drop(name)
            return None
        return raw

    def _drop(self, name: str) -> None:
        _, raw = self._kept.pop(name)
        self.bytes -= ENTRY_BYTES + len(raw)


class RedisReceipts:
    """Receipts behind a connection. While it keeps failing, calls fail at once. `clock` counts seconds."""

    def __init__(
        self, connection: RedisConnection, clock: Callable[[], float], sealer: ReceiptSealer | None = None
    ) -> None:
        self._connection = connection
        self._sealer = sealer or ReceiptSealer()
        self._clock = clock
        self._breaker = Breaker()

    def __repr__(self) -> str:
        return f"<RedisReceipts {self._breaker!r}>"

    async def put(self, name: str, raw: bytes, ttl_s: float) -> None:
        """Keep a receipt; raises `StoreUnavailable`."""
        kept = self._sealer.seal(name, raw)
        await self._call(lambda redis: redis.set(_key(name), kept, px=int(ttl_s * 1000)))

    async def get(self, name: str) -> bytes | None:
        """Raises `StoreUnavailable`, or `Sealed` where what is kept cannot be read."""
        found = await self._call(lambda redis: redis.get(_key(name)))
        return self._sealer.open(name, found) if isinstance(found, bytes) else None

    async def _call(self, command: Callable[[Redis], Awaitable[object]]) -> object:
        with guarded(self._breaker, self._clock):
            async with self._connection.answering():
                return await command(self._connection.redis)


def _key(name: str) -> str:
    return f"verbatim:receipt:{name}"
