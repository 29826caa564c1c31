"""Logs in a real Valkey: atomic and idempotent, and whatever happens to it, nothing wrong comes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis
from redis_process import RedisProcess, redis_process
from toy_model import float32

from gateway.breaker import THRESHOLD
from gateway.commit_log.memory import Conflict, Gap, MemoryLogs
from gateway.commit_log.redis import PIECES, Lease, RedisLogs
from gateway.commit_log.sealing import ENCRYPTED, HEAD, Checked, Encrypted, Sealer
from gateway.domain import Scored, Token
from gateway.operator_keys import KEY_ID_BYTES
from gateway.redis_connection import RedisConnection, Script, StoreUnavailable

KEY = bytes(range(32))
NAME = f"verbatim:log:{{{KEY.hex()}}}"
ME, YOU = Lease("me", 0), Lease("you", 0)


def truth(position: int, top: int = 0) -> Token:
    return Token(position % 7, float32(-position / 3), tuple(Scored(i, float32(-i / 7)) for i in range(top)))


def truths(start: int, stop: int, top: int = 0) -> list[Token]:
    return [truth(position, top) for position in range(start, stop)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def client(server: RedisProcess) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        await client.flushall()
        yield client


SECRET = bytes(range(32))


def sealer_of(kind: str) -> Sealer:
    return Checked() if kind == "plain" else Encrypted([SECRET])


@pytest.fixture(params=["plain", "encrypted"])
async def logs(request: pytest.FixtureRequest, server: RedisProcess, client: Redis) -> AsyncIterator[RedisLogs]:
    logs = RedisLogs(RedisConnection(server.url, deadline_s=10), Clock(), sealer=sealer_of(request.param))
    yield logs
    await logs.connection.aclose()


async def stands(logs: RedisLogs, start: int = 0) -> list[Token]:
    return list((await logs.look(KEY, start, None)).tokens)


async def test_what_is_appended_stands_and_grows(logs: RedisLogs, client: Redis) -> None:
    assert await stands(logs) == []
    await logs.append(KEY, 0, truths(0, 3), 60, None)
    await logs.append(KEY, 0, truths(0, 3), 60, None)
    await logs.append(KEY, 2, truths(2, 5, top=2), 60, None)
    expected = [*truths(0, 2), *truths(2, 5, top=2)]
    assert await stands(logs) == expected
    assert await stands(logs, 3) == expected[3:]
    await logs.append(KEY, 1, truths(1, 4), 60, None)
    assert await stands(logs) == expected, "alternatives once known stay known"
    assert 0 < await client.pttl(NAME) <= 60_000
    assert 0 < (await logs.look(KEY, 0, None)).ttl_s <= 60


async def test_an_append_that_disagrees_or_leaves_a_gap_changes_nothing(logs: RedisLogs) -> None:
    await logs.append(KEY, 0, truths(0, 3, top=1), 60, None)
    bad = msgspec.structs.replace(truth(2), logprob=-77.0)
    for tokens in ([truth(1, top=2), bad, truth(3)], [truth(1, top=2), msgspec.structs.replace(truth(2), id=9)]):
        with pytest.raises(Conflict) as conflict:
            await logs.append(KEY, 1, tokens, 60, None)
        assert conflict.value.position == 2
    with pytest.raises(Gap) as gap:
        await logs.append(KEY, 4, truths(4, 6), 60, None)
    assert gap.value.length == 3
    assert await stands(logs) == truths(0, 3, top=1)
    assert logs.damaged == 0


class LogMachine(RuleBasedStateMachine):
    """Whatever is appended, lost or damaged, what is read is the right sequence up to some token, and every answer is
    the one that the log in memory gives, which is the model."""

    def __init__(self, url: str, kind: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = MemoryLogs(1 << 20, Clock())
        self.client = Redis.from_url(url)
        self.logs = RedisLogs(RedisConnection(url, deadline_s=10), Clock(), sealer=sealer_of(kind))
        self.runner.run(self.client.flushall())

    def teardown(self) -> None:
        self.runner.run(self.logs.connection.aclose())
        self.runner.run(self.client.aclose())
        self.runner.close()

    @rule(
        position=st.integers(0, 14), count=st.integers(1, 4), top=st.integers(0, 2), bad=st.none() | st.integers(0, 3)
    )
    def append(self, position: int, count: int, top: int, bad: int | None) -> None:
        tokens = truths(position, position + count, top)
        if bad is not None and bad < count:
            if position + bad >= len(self.model.read(KEY)):
                return  # It would stand.
            tokens[bad] = msgspec.structs.replace(tokens[bad], logprob=-77.0)
        said: list[str] = []
        for append in (
            lambda: self.model.append(KEY, position, tokens, 60),
            lambda: self.runner.run(self.logs.append(KEY, position, tokens, 60, None)),
        ):
            try:
                append()
                said.append("stands")
            except (Conflict, Gap) as refusal:
                said.append(repr(refusal))
        assert said[0] == said[1]

    @rule(count=st.integers(1, 2))
    def go_on(self, count: int) -> None:
        position = len(self.model.read(KEY))
        self.append(position, count, 0, None)

    @rule()
    def lose(self) -> None:
        """It expired, or was evicted."""
        self.runner.run(self.client.delete(NAME))
        self.model.drop(KEY)

    @rule(chance=st.integers(0, 2**16), bit=st.integers(0, 7))
    def damage(self, chance: int, bit: int) -> None:
        blocks = self.runner.run(self.client.lrange(NAME, 0, -1))
        if not blocks:
            return
        index = chance % len(blocks)
        block = bytearray(blocks[index])
        at = chance % len(block)
        if block[0] == ENCRYPTED and (at == 0 or HEAD.size <= at < HEAD.size + KEY_ID_BYTES):
            return  # Another kind, or another key, is no damage: see below.
        block[at] ^= 1 << bit
        self.runner.run(self.client.lset(NAME, index, bytes(block)))
        self._stands_up_to(sum(HEAD.unpack_from(before)[2] for before in blocks[:index]))
        assert self.runner.run(stands(self.logs)) == list(self.model.read(KEY))

    @rule(start=st.integers(1, 16))
    def follow(self, start: int) -> None:
        assert self.runner.run(stands(self.logs, start)) == list(self.model.read(KEY))[start:]

    @invariant()
    def stands_as_in_the_model(self) -> None:
        assert self.runner.run(stands(self.logs)) == list(self.model.read(KEY))
        assert self.runner.run(self.client.llen(NAME)) <= PIECES + 1

    def _stands_up_to(self, length: int) -> None:
        tokens = list(self.model.read(KEY))[:length]
        self.model.drop(KEY)
        if tokens:
            self.model.append(KEY, 0, tokens, 60)


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_whatever_happens_to_it_redis_says_what_memory_says(server: RedisProcess, kind: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: LogMachine(server.url, kind), settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )


async def test_one_leads_until_it_ends(logs: RedisLogs, client: Redis) -> None:
    assert (await logs.look(KEY, 0, ME)).leads
    assert not (await logs.look(KEY, 0, YOU)).leads
    assert (await logs.look(KEY, 0, ME)).leads
    assert (await logs.look(KEY, 0, Lease("you", 5))).leads, "with other alternatives it is another work"
    assert await logs.append(KEY, 0, truths(0, 1), 60, ME)
    assert not await logs.append(KEY, 0, truths(0, 2), 60, YOU), "what it says is right all the same"
    assert await stands(logs) == truths(0, 2)
    await logs.release(KEY, YOU)
    assert not (await logs.look(KEY, 0, YOU)).leads
    await logs.release(KEY, ME)
    assert (await logs.look(KEY, 0, YOU)).leads
    assert not await logs.append(KEY, 2, truths(2, 3), 60, ME), "who lost its lease is told"
    assert 0 < await client.pttl(NAME + ":lead:0") <= 3000
    await client.delete(NAME + ":lead:0")
    assert await logs.append(KEY, 2, truths(2, 3), 60, ME), "a lease that ended may be taken again"


async def test_of_many_at_once_one_leads(server: RedisProcess, client: Redis) -> None:
    many = [RedisLogs(RedisConnection(server.url, deadline_s=30), Clock()) for _ in range(4)]
    looks = [one.look(KEY, 0, Lease(f"{i} {j}", 0)) for i, one in enumerate(many) for j in range(16)]
    assert sum(look.leads for look in await asyncio.gather(*looks)) == 1
    appends = [one.append(KEY, 0, truths(0, 1 + j), 60, None) for one in many for j in range(16)]
    await asyncio.gather(*appends)
    assert await stands(many[0]) == truths(0, 16)
    for one in many:
        await one.connection.aclose()


async def test_both_keys_of_a_log_are_in_one_slot(logs: RedisLogs, client: Redis) -> None:
    await logs.look(KEY, 0, ME)
    await logs.append(KEY, 0, truths(0, 1), 60, ME)
    names = [name.decode() for name in await client.keys("*")]
    assert len(names) == 2
    assert len({await client.execute_command("CLUSTER", "KEYSLOT", name) for name in names}) == 1


async def test_a_log_in_many_pieces_becomes_one_when_it_is_read(logs: RedisLogs, client: Redis) -> None:
    for position in range(PIECES):
        await logs.append(KEY, position, truths(position, position + 1), 60, None)
    assert await stands(logs) == truths(0, PIECES)
    assert await client.llen(NAME) == PIECES
    await logs.append(KEY, PIECES, truths(PIECES, PIECES + 1), 60, None)
    assert await stands(logs, 3) == truths(3, PIECES + 1)
    assert await client.llen(NAME) == PIECES + 1, "who follows does not see all of it"
    assert await stands(logs) == truths(0, PIECES + 1)
    assert (await client.llen(NAME), await stands(logs)) == (1, truths(0, PIECES + 1))
    assert 0 < await client.pttl(NAME) <= 60_000
    assert await stands(logs, 4) == truths(4, PIECES + 1)
    await logs.append(KEY, PIECES + 1, truths(PIECES + 1, PIECES + 3), 60, None)
    assert await stands(logs) == truths(0, PIECES + 3)


async def test_a_log_that_changed_meanwhile_is_not_rewritten(logs: RedisLogs, client: Redis) -> None:
    await logs.append(KEY, 0, truths(0, 2), 60, None)
    before = await client.lrange(NAME, 0, -1)
    await logs.append(KEY, 2, truths(2, 4), 60, None)
    await logs._rewrite(KEY, before, truths(0, 2))
    assert await stands(logs) == truths(0, 4)


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_who_has_other_keys_leaves_a_log_alone_and_uses_none(server: RedisProcess, client: Redis) -> None:
    old, new = SECRET, bytes(range(1, 33))
    sealers = [Checked(), Encrypted([old]), Encrypted([new, old]), Encrypted([new])]
    plain, before, between, after = (
        RedisLogs(RedisConnection(server.url, deadline_s=10), Clock(), sealer=sealer) for sealer in sealers
    )
    await before.append(KEY, 0, truths(0, 3), 60, ME)
    blocks = await client.lrange(NAME, 0, -1)
    for others in (plain, after):
        await unavailable(lambda others=others: others.look(KEY, 0, YOU))
        await unavailable(lambda others=others: others.append(KEY, 0, truths(0, 3), 60, YOU))
        assert (others.foreign, others.unanswered, others.damaged) == (2, 0, 0)
        assert "closed" in repr(others), "that is no fault of Redis"
    assert await client.lrange(NAME, 0, -1) == blocks
    assert await stands(between) == truths(0, 3)
    await between.append(KEY, 0, truths(0, 3, top=2), 60, ME)
    assert await stands(after) == await stands(between) == truths(0, 3, top=2)
    for one in (plain, before, between, after):
        await one.connection.aclose()


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 4, 5, HEAD.size + 4, -1])
async def test_a_damaged_block_is_cut_off_with_what_is_behind_it(
    logs: RedisLogs, client: Redis, index: int, at: int
) -> None:
    for position in (0, 2, 4):
        await logs.append(KEY, position, truths(position, position + 2), 60, None)
    block = bytearray(await client.lindex(NAME, index))
    block[at] ^= 64
    await client.lset(NAME, index, bytes(block))
    assert await stands(logs) == truths(0, 2 * index)
    assert await client.llen(NAME) == index
    assert (logs.damaged, logs.foreign) == (1, 0)
    await logs.append(KEY, 2 * index, truths(2 * index, 6), 60, None)
    assert await stands(logs) == truths(0, 6)


@pytest.mark.parametrize("block", [b"", b"\0" * 8, b"\3" * 40, b"\xff" * 9])
@pytest.mark.parametrize("index", [0, 1, 2])
async def test_whatever_stands_in_a_log_it_can_be_gone_on_with(
    logs: RedisLogs, client: Redis, block: bytes, index: int
) -> None:
    for position in (0, 2, 4):
        await logs.append(KEY, position, truths(position, position + 2), 60, None)
    await client.lset(NAME, index, block)
    try:
        await logs.append(KEY, 5, truths(5, 7), 60, None)
    except Gap:
        await logs.append(KEY, 0, truths(0, 7), 60, None)
    assert await stands(logs, 5) in ([], truths(5, 7))
    if not await stands(logs):
        await logs.append(KEY, 0, truths(0, 7), 60, None)
    tokens = await stands(logs)
    assert tokens == truths(0, len(tokens))
    assert (await logs.look(KEY, 2**31, ME)).tokens == ()


async def test_blocks_out_of_order_are_damage(logs: RedisLogs, client: Redis) -> None:
    for position in (0, 2, 4):
        await logs.append(KEY, position, truths(position, position + 2), 60, None)
    blocks = await client.lrange(NAME, 0, -1)
    await client.lset(NAME, 0, blocks[2])
    assert await stands(logs) == []
    await client.rpush(NAME, blocks[0], blocks[2])
    assert await stands(logs, 4) == truths(4, 6), "each is where it says"
    assert await stands(logs) == truths(0, 2)


async def test_a_block_of_another_log_is_seen(logs: RedisLogs, client: Redis) -> None:
    await logs.append(KEY, 0, truths(0, 2), 60, None)
    other = bytes(32)
    await client.copy(NAME, f"verbatim:log:{{{other.hex()}}}")
    assert (await logs.look(other, 0, None)).tokens == ()


@pytest.mark.parametrize("make", ["set", "hset", "sadd"])
async def test_a_key_of_another_type_is_thrown_away(logs: RedisLogs, client: Redis, make: str) -> None:
    values = ("field", "value") if make == "hset" else ("value",)
    for name in (NAME, NAME + ":lead:0"):
        await getattr(client, make)(name, *values)
    assert await stands(logs) == []
    await getattr(client, make)(NAME, *values)
    if make != "set":
        assert (await logs.look(KEY, 0, ME)).leads
    await getattr(client, make)(NAME, *values)
    await logs.append(KEY, 0, truths(0, 2), 60, None)
    assert await stands(logs) == truths(0, 2)


# --- trouble ---------------------------------------------------------------------------------------------------------


async def unavailable(*operations: Callable[[], Awaitable[object]]) -> None:
    for operation in operations:
        with pytest.raises(StoreUnavailable):
            await operation()


async def test_a_frozen_redis_opens_the_breaker_and_a_thawed_one_closes_it(tmp_path: Path) -> None:
    clock = Clock()
    with redis_process(tmp_path) as running:
        logs = RedisLogs(RedisConnection(running.url), clock)
        patient = RedisLogs(RedisConnection(running.url, deadline_s=30), clock)
        await patient.append(KEY, 0, truths(0, 3), 60, None)
        running.freeze()
        await unavailable(*[lambda: logs.look(KEY, 0, ME)] * THRESHOLD)
        assert logs.unanswered == THRESHOLD
        await unavailable(lambda: logs.append(KEY, 3, truths(3, 4), 60, None), lambda: logs.release(KEY, ME))
        assert logs.unanswered == THRESHOLD, "nobody asks any more"
        running.thaw()
        await patient.look(KEY, 0, None)
        clock.now += 1
        logs.connection._deadline_s = 30
        assert await stands(logs) == truths(0, 3)
        await logs.connection.aclose()
        await patient.connection.aclose()


async def test_a_dead_redis_and_one_restarted_empty(tmp_path: Path) -> None:
    clock = Clock()
    with redis_process(tmp_path) as running:
        port = int(running.url.split(":")[-1].split("/")[0])
        logs = RedisLogs(RedisConnection(running.url, deadline_s=30), clock)
        await logs.append(KEY, 0, truths(0, 3), 60, None)
        running.stop()
        await unavailable(*[lambda: logs.look(KEY, 0, None)] * THRESHOLD)
    with redis_process(tmp_path, port):
        clock.now += 1
        with pytest.raises(Gap):
            await logs.append(KEY, 3, truths(3, 4), 60, None)
        await logs.append(KEY, 0, truths(0, 4), 60, None)
        assert await stands(logs) == truths(0, 4)
        await logs.connection.aclose()


async def test_a_full_redis_is_still_read(logs: RedisLogs, client: Redis) -> None:
    await logs.append(KEY, 0, truths(0, 3), 60, None)
    await client.config_set("maxmemory", 1)
    try:
        look = await logs.look(KEY, 0, ME)
        assert (list(look.tokens), look.leads) == (truths(0, 3), True)
        await unavailable(lambda: logs.append(KEY, 3, truths(3, 4), 60, ME))
        assert await stands(logs) == truths(0, 3)
    finally:
        await client.config_set("maxmemory", 0)


async def test_a_replica_that_cannot_be_written_is_still_read(
    logs: RedisLogs, server: RedisProcess, client: Redis, tmp_path: Path
) -> None:
    await logs.append(KEY, 0, truths(0, 3), 60, None)
    leader = server.url.removeprefix("redis://").removesuffix("/0").replace(":", " ")
    with redis_process(tmp_path, None, "--replicaof", leader) as replica:
        reading = RedisLogs(RedisConnection(replica.url, deadline_s=10), Clock(), sealer=logs._sealer)
        async with Redis.from_url(replica.url) as there:
            while (await there.info("replication"))["master_link_status"] != "up":
                await client.execute_command("WAIT", 1, 100)
        look = await reading.look(KEY, 0, ME)
        assert (list(look.tokens), look.leads) == (truths(0, 3), True)
        await unavailable(lambda: reading.append(KEY, 3, truths(3, 4), 60, ME))
        assert await stands(reading) == truths(0, 3)
        await reading.connection.aclose()


async def test_a_slow_redis_is_not_waited_for(server: RedisProcess, client: Redis) -> None:
    """It is busy with something else for a while."""
    patient = RedisLogs(RedisConnection(server.url, deadline_s=60), Clock())
    hasty = RedisLogs(RedisConnection(server.url, deadline_s=0.02), Clock())
    await patient.append(KEY, 0, truths(0, 3), 60, None)
    work = Script("local n = 0 while n < 1e8 do n = n + 1 end return 1")
    busy = asyncio.create_task(patient.connection.run(work, [], []))
    await asyncio.sleep(0.1)
    await unavailable(*[lambda: hasty.look(KEY, 0, ME)] * THRESHOLD)
    assert not busy.done(), "it is at work all the time"
    assert (await busy, hasty.unanswered) == (1, THRESHOLD)
    assert await stands(patient) == truths(0, 3)
    for one in (hasty, patient):
        await one.connection.aclose()


async def test_a_deadline_is_put_off_while_this_process_is_held_up(logs: RedisLogs) -> None:
    await logs.append(KEY, 0, truths(0, 2), 60, None)
    logs.connection._deadline_s = 0.05
    for moment in range(6):
        looking = asyncio.create_task(logs.look(KEY, 0, None))
        for _ in range(moment):
            await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  # what a busy event loop does
        assert list((await looking).tokens) == truths(0, 2), moment


async def test_a_deadline_holds_at_any_moment_of_a_call(logs: RedisLogs) -> None:
    await logs.look(KEY, 0, None)  # It is connected now.
    for deadline_s in (0, 1e-6):
        logs.connection._deadline_s = deadline_s
        with pytest.raises(StoreUnavailable):
            await logs.look(KEY, 0, None)
