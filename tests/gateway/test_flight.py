"""Readers that come at an awkward moment: while what was generated is on its way into the log, or stands there already
because somebody else was ahead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from redis_process import RedisProcess
from test_cache import answer, begin, cache, caching, fresh
from toy_backend import ToyBackend, Wait, on

from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.redis import Lease, RedisLogs
from gateway.domain import Token
from gateway.redis_connection import RedisConnection


class HeldLogs(RedisLogs):
    """Redis whose answer to the nth append waits until it is let go."""

    def __init__(self, connection: RedisConnection, nth: int) -> None:
        super().__init__(connection, time.monotonic)
        self._until = nth
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def append(
        self, key: bytes, position: int, tokens: Sequence[Token], ttl_s: float, lease: Lease | None
    ) -> bool:
        leads = await super().append(key, position, tokens, ttl_s, lease)
        if self._until == 0:
            self.reached.set()
            await self.go.wait()
        self._until -= 1
        return leads


class WatchedLogs(MemoryLogs):
    """Logs in memory that tell when somebody reads."""

    def __init__(self) -> None:
        super().__init__(1 << 20, time.monotonic)
        self.was_read = asyncio.Event()

    def read(self, key: bytes) -> Sequence[Token]:
        self.was_read.set()
        return super().read(key)


async def test_a_reader_that_comes_while_tokens_are_being_kept(toy: ToyBackend, server: RedisProcess) -> None:
    """They are in the log, and not yet in the hands of the one that generated them: nobody gets them twice."""
    expected = await fresh(max_tokens=40, logprobs=True)
    for nth in range(3):
        connection = RedisConnection(server.url, deadline_s=10)
        await connection.redis.flushall()
        held = HeldLogs(connection, nth)
        memory = WatchedLogs()
        async with caching(toy.url, commit_log=CommitLog(memory, held)) as gateway:
            leader = asyncio.create_task(gateway.chat(max_tokens=40, logprobs=True))
            await held.reached.wait()
            memory.was_read.clear()
            reader = asyncio.create_task(gateway.chat(max_tokens=40, logprobs=True))
            await memory.was_read.wait()
            held.go.set()
            assert answer(await leader) == answer(await reader) == expected
            again = await gateway.chat(max_tokens=40, logprobs=True)
            assert (cache(again), answer(again)) == ("hit", expected)
        await connection.aclose()


async def test_a_reader_that_finds_more_than_its_flight_has_generated(toy: ToyBackend) -> None:
    """A flight with more alternatives was ahead, and what it left in memory is more than the slower one knows."""
    gate = asyncio.Event()
    toy.faults = on("/v1/verify", Wait(gate), nth=2)
    async with caching(toy.url) as gateway:
        slow = await begin(gateway, max_tokens=60)
        await toy.hung.acquire()
        fast = await gateway.chat(max_tokens=30, logprobs=True, top_logprobs=2)
        reader = await begin(gateway, max_tokens=50)
        gate.set()
        for response in (slow, reader):
            await response.aread()
        assert answer(fast) == await fresh(max_tokens=30, logprobs=True, top_logprobs=2)
        assert answer(slow) == await fresh(max_tokens=60, stream=True)
        assert answer(reader) == await fresh(max_tokens=50, stream=True)
        again = await gateway.chat(max_tokens=60)
        assert (cache(again), answer(again)) == ("hit", await fresh(max_tokens=60))
        assert gateway.log.stores.conflicts == 0


async def test_what_is_under_way_leaves_nothing_in_a_log_that_is_thrown_away(
    toy: ToyBackend, server: RedisProcess
) -> None:
    """Neither what it read before nor what it generates; and nobody who comes later waits for it."""
    connection = RedisConnection(server.url, deadline_s=10)
    await connection.redis.flushall()
    shared = RedisLogs(connection, time.monotonic)
    gate = asyncio.Event()
    toy.faults = on("/v1/verify", Wait(gate), nth=2)
    async with caching(toy.url, commit_log=CommitLog(MemoryLogs(1 << 20, time.monotonic), shared)) as gateway:
        under_way = [await begin(gateway, max_tokens=40) for _ in range(2)]
        await toy.hung.acquire()
        assert len(gateway.log.stores.memory) == gateway.log.flights == 1
        gateway.log.forget(lambda key: True)
        await connection.redis.delete(*await connection.redis.keys("*}"))
        gate.set()
        for response in under_way:
            await response.aread()
            assert answer(response) == await fresh(max_tokens=40, stream=True)
        assert len(gateway.log.stores.memory) == gateway.log.flights == 0
        assert await connection.redis.keys("*") == [], "neither log nor lease"
        again = await gateway.chat(max_tokens=40)
        assert (cache(again), answer(again)) == ("lead", await fresh(max_tokens=40))
    await connection.aclose()


async def test_nobody_waits_for_tokens_that_are_not_kept(toy: ToyBackend, server: RedisProcess) -> None:
    """Behind the last token that a log takes each gateway goes on by itself."""
    gate = asyncio.Event()
    async with AsyncExitStack() as stack:
        gateways = []
        for _ in range(2):
            connection = RedisConnection(server.url, deadline_s=10)
            stack.push_async_callback(connection.aclose)
            await connection.redis.flushall()
            logs = CommitLog(MemoryLogs(1 << 20, time.monotonic), RedisLogs(connection, time.monotonic))
            opened = caching(toy.url, "{scope: tenant, max_tokens: 10}", commit_log=logs)
            gateways.append(await stack.enter_async_context(opened))
        toy.faults = on("/v1/verify", Wait(gate), nth=3)
        leader = asyncio.create_task(gateways[0].chat(max_tokens=60))
        await toy.hung.acquire()
        async with asyncio.timeout(10):
            other = await gateways[1].chat(max_tokens=60)
        assert not leader.done()
        gate.set()
        assert answer(await leader) == answer(other) == await fresh(max_tokens=60)
        assert [key async for key in connection.redis.scan_iter("*:lead:*")] == []
