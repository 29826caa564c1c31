"""Purges: which logs are meant, and that they are gone from Redis and from every gateway's memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis_process import RedisProcess
from toy_model import float32

from backend.protocol import Sampling
from gateway.commit_log.key import fingerprint_tag, log_key, reader_tag
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.purges import STREAM, Purged, Purges
from gateway.commit_log.redis import Lease, RedisLogs, log_name
from gateway.commit_log.selection import Selection
from gateway.domain import Job, Token
from gateway.redis_connection import RedisConnection, StoreUnavailable

READERS = ("acme", "other", None)
FINGERPRINTS = ("f", "g")


def key(reader: str | None, fingerprint: str, first: int = 1) -> bytes:
    return log_key(reader, fingerprint, Job((first,), Sampling(), 4, (), 0))


KEYS = [key(reader, fingerprint, n) for reader in READERS for fingerprint in FINGERPRINTS for n in range(3)]
TOKENS = [Token(1, float32(-0.5))]


def test_a_selection_is_all_that_it_says() -> None:
    assert all(map(Selection(), KEYS))
    assert [k for k in KEYS if Selection(reader_tag=reader_tag("acme"))(k)] == KEYS[:6]
    assert [k for k in KEYS if Selection(reader_tag=reader_tag(None))(k)] == KEYS[12:]
    f = Selection(fingerprint_tag=fingerprint_tag("g"))
    assert [k for k in KEYS if f(k)] == KEYS[3:6] + KEYS[9:12] + KEYS[15:]
    both = Selection(reader_tag("acme"), fingerprint_tag("g"))
    assert [k for k in KEYS if both(k)] == KEYS[3:6]
    assert [k for k in KEYS if Selection(prefix=KEYS[4].hex())(k)] == [KEYS[4]]
    assert not any(map(Selection(reader_tag("acme"), prefix=KEYS[-1].hex()), KEYS))


@given(st.sampled_from(READERS), st.sampled_from(FINGERPRINTS), st.integers(0, 80), st.sampled_from(KEYS))
async def test_no_log_of_a_selection_is_missed_by_its_pattern(
    reader: str | None, fingerprint: str, digits: int, one: bytes
) -> None:
    """As Redis reads globs: `?` and `*` are all that stands in one."""
    for selection in (
        Selection(reader_tag(reader)),
        Selection(fingerprint_tag=fingerprint_tag(fingerprint)),
        Selection(reader_tag(reader), fingerprint_tag(fingerprint), one.hex()[:digits]),
    ):
        stem = selection.pattern.removesuffix("*")
        for k in filter(selection, KEYS):
            assert len(k.hex()) >= len(stem)
            assert all(p in ("?", c) for p, c in zip(stem, k.hex(), strict=False))


def memory_of(keys: list[bytes]) -> MemoryLogs:
    memory = MemoryLogs(1 << 20, lambda: 0.0)
    for one in keys:
        memory.append(one, 0, TOKENS, 60)
    return memory


async def test_without_a_shared_store_the_memory_is_purged() -> None:
    memory = memory_of(KEYS)
    assert await Purges(memory.purge, None).purge(Selection(reader_tag("acme"))) == Purged(6, None)
    assert len(memory) == len(KEYS) - 6
    assert not memory.read(KEYS[0]) and memory.read(KEYS[6])
    await Purges(memory.purge, None).purge(Selection())
    assert (len(memory), memory.bytes) == (0, 0)


@pytest.fixture
async def connection(server: RedisProcess) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(server.url, deadline_s=10)
    await connection.redis.flushall()
    yield connection
    await connection.aclose()


async def test_a_purge_reaches_redis_and_every_gateway(connection: RedisConnection) -> None:
    logs = RedisLogs(connection, lambda: 0.0)
    for one in KEYS:
        await logs.append(one, 0, TOKENS, 60, Lease("leader", 0))
    here, there = memory_of(KEYS), memory_of(KEYS)
    far = Purges(there.purge, connection, 0.01)
    assert await Purges(here.purge, connection, 0.01).purge(Selection(reader_tag("acme"))) == Purged(6, 6)
    await far.catch_up(connection)
    gone = KEYS[:6]
    for one in KEYS:
        stands = one not in gone
        assert bool((await logs.look(one, 0, None)).tokens) == stands
        assert bool(here.read(one)) == bool(there.read(one)) == stands
    assert await connection.redis.exists(log_name(KEYS[0].hex()) + ":lead:0"), "who generates it now goes on"
    # Each announcement is heeded once: what is kept since then stands.
    there.append(KEYS[0], 0, TOKENS, 60)
    await far.catch_up(connection)
    assert there.read(KEYS[0])


async def test_a_purge_that_redis_does_not_hear_of_says_so(connection: RedisConnection) -> None:
    memory = memory_of(KEYS)
    nowhere = RedisConnection("redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable):
        await Purges(memory.purge, nowhere, 0.01).purge(Selection())
    assert len(memory) == 0


async def test_more_logs_than_one_look_finds(connection: RedisConnection) -> None:
    client: Redis = connection.redis
    async with client.pipeline(transaction=False) as pipe:
        for n in range(2500):
            pipe.rpush(log_name(key("acme", "f", n).hex()), b"x")
        pipe.rpush("somebody:else", b"x")
        await pipe.execute()
    assert await Purges(memory_of([]).purge, connection, 0.01).purge(Selection()) == Purged(0, 2500)
    assert sorted(await client.keys("*")) == [b"somebody:else", STREAM.encode()]


async def test_a_purge_that_cannot_be_read_is_one_of_all(connection: RedisConnection) -> None:
    memory = memory_of(KEYS)
    await connection.redis.xadd(STREAM, {"later": "version"})
    await Purges(memory.purge, connection).catch_up(connection)
    assert len(memory) == 0


class Enough(Exception):
    """The third look."""


class ThreeLooks(Purges):
    looks = 0

    async def catch_up(self, connection: RedisConnection) -> None:
        self.looks += 1
        if self.looks == 3:
            raise Enough
        await super().catch_up(connection)


async def test_a_gateway_that_hears_of_no_purge_says_so(
    connection: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, also where all else in that Redis answers it."""
    await connection.redis.set(STREAM, "somebody else's")
    with pytest.raises(Enough):
        await ThreeLooks(memory_of([]).purge, connection, 0.001).watch()
    assert [record.getMessage() for record in caplog.records] == [
        "purges are not heard of (ResponseError): what others purge still stands in this memory"
    ]
