"""Token buckets and leases, in memory and in a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis_process import RedisProcess, redis_process

from gateway.errors import LimitsUnavailable, RateLimited
from gateway.limits.headers import duration
from gateway.limits.limiter import Limiter
from gateway.limits.memory import SWEEP_AT, MemoryStore
from gateway.limits.redis import RedisStore
from gateway.limits.store import Charge, Lease, LimitStore, Taken, spend
from gateway.redis_connection import RedisConnection, Script, StoreUnavailable
from policies.decision import Limits, Quota, Rate
from policies.document import Unavailable

# However busy the machine is: no time is asserted.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

MINUTE_MS = 60_000.0


# --- the bucket ------------------------------------------------------------------------------------------------------


@UNHURRIED
@given(
    st.integers(1, 10**6),
    st.floats(0.1, 60),
    st.lists(st.tuples(st.floats(0, 5000), st.integers(1, 50)), min_size=1, max_size=60),
)
def test_no_span_of_time_gets_more_than_its_rate_and_one_burst(
    per_minute: int, burst_s: float, arrivals: list[tuple[float, int]]
) -> None:
    capacity = max(1.0, per_minute / 60 * burst_s)
    now, full_at = 0.0, 0.0
    let_through: list[tuple[float, float]] = []
    for gap_ms, cost in arrivals:
        now += gap_ms
        charge = Charge("k", "requests", cost, per_minute, capacity)
        after, wait_ms = spend(full_at, now, charge)
        if wait_ms == 0:
            full_at = after
            let_through.append((now, cost))
        else:
            # Having waited as long as it was told, the same charge is let through.
            assert spend(full_at, now + wait_ms, charge)[1] == 0
            assert spend(full_at, now + wait_ms * 0.99 - 0.01, charge)[1] > 0 or wait_ms < 0.02
    for first, last in itertools.combinations(range(len(let_through)), 2):
        span_ms = let_through[last][0] - let_through[first][0]
        spent = sum(cost for _, cost in let_through[first : last + 1])
        # The last one may leave a debt of what is beyond the capacity.
        debt = max(0.0, let_through[last][1] - capacity)
        assert (
            spent
            <= capacity
            + debt
            + per_minute * span_ms / MINUTE_MS
            + max(0.0, let_through[first][1] - capacity)
            + 1e-3 * per_minute
        )


def test_a_busy_minute_is_within_two_per_cent() -> None:
    for per_minute in (60, 600, 6000):
        charge = Charge("k", "requests", 1, per_minute, per_minute / 60)
        full_at, passed = 0.0, 0
        for now in range(60_000):  # far more than the limit, each millisecond
            after, wait_ms = spend(full_at, float(now), charge)
            if wait_ms == 0:
                full_at, passed = after, passed + 1
        assert per_minute <= passed <= per_minute * 1.02, per_minute


def test_what_is_given_back_can_be_spent_again() -> None:
    charge = Charge("k", "tokens", 100, 60, 100)
    full_at, _ = spend(0.0, 1000.0, charge)
    assert spend(full_at, 1000.0, charge)[1] > 0
    back, wait_ms = spend(full_at, 1000.0, Charge("k", "tokens", -100, 60, 100))
    assert (back, wait_ms) == (1000.0, 0.0)
    # A bucket is never more than full.
    assert spend(back, 1000.0, Charge("k", "tokens", -1000, 60, 100))[0] == 1000.0


# --- stores ----------------------------------------------------------------------------------------------------------


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        yield MemoryStore(Clock())
        return
    running: RedisProcess = request.getfixturevalue("server")
    redis = RedisStore(RedisConnection(running.url, deadline_s=10))
    async with Redis.from_url(running.url) as client:
        await client.flushall()
    yield redis
    await redis.connection.aclose()


def charge(cost: float, key: str = "k", per_minute: int = 6, capacity: float = 10) -> Charge:
    """Ten at once, and one in ten seconds."""
    return Charge(key, "requests", cost, per_minute, capacity)


async def test_all_is_taken_or_nothing(store: LimitStore) -> None:
    lease = Lease("p", ("a",), 1, 30_000)
    taken = await store.take([charge(6), charge(2, "other")], lease)
    assert taken.refused is None
    assert [round(ms, -4) for ms in taken.until_full_ms] == [60_000, 20_000]
    for charges, another, refused in (
        ([charge(5), charge(1, "other")], None, 0),
        ([charge(1, "other"), charge(5)], None, 1),
        ([charge(1), charge(1, "other")], Lease("p", ("b",), 1, 30_000), 2),
    ):
        assert (await store.take(charges, another)).refused == refused
    taken = await store.take([charge(4), charge(8, "other")], None)
    assert taken.refused is None
    assert [round(ms, -4) for ms in taken.until_full_ms] == [100_000, 100_000]


async def test_a_cost_above_the_capacity_takes_a_full_bucket_into_debt(store: LimitStore) -> None:
    assert (await store.take([charge(25)], None)).refused is None
    taken = await store.take([charge(1)], None)
    assert taken.refused == 0
    assert round(taken.wait_ms, -3) == 160_000  # sixteen beyond nine tenths of the bucket
    await store.give_back([charge(-24)], None)
    assert (await store.take([charge(9)], None)).refused is None


async def test_places_are_held_renewed_and_given_back(store: LimitStore) -> None:
    two, one = Lease("p", ("a", "b"), 3, 30_000), Lease("p", ("c",), 3, 30_000)
    assert (await store.take([], two)).refused is None
    assert (await store.take([], two)).refused is None  # the same ones
    assert (await store.take([], Lease("p", ("c", "d"), 3, 30_000))).refused == 0
    assert (await store.take([], one)).refused is None
    assert (await store.take([], Lease("q", ("x",), 1, 30_000))).refused is None
    assert (await store.take([], Lease("p", ("e",), 3, 30_000))).wait_ms == 1000
    await store.give_back([], two)
    await store.give_back([], two)
    assert (await store.take([], Lease("p", ("e", "f"), 3, 30_000))).refused is None


async def test_a_lease_that_nobody_renews_ends(server: RedisProcess) -> None:
    store = RedisStore(RedisConnection(server.url, deadline_s=10))
    assert (await store.take([], Lease("ends", ("a",), 1, 1))).refused is None
    while (await store.take([], Lease("ends", ("b",), 1, 30_000))).refused is not None:
        pass
    # It ends by itself, and not only with the last of its set.
    assert (await store.take([], Lease("ends", ("c",), 2, 30_000))).refused is None
    async with Redis.from_url(server.url) as client:
        await client.zadd("ends", {"c": 1})
    assert (await store.take([], Lease("ends", ("d",), 2, 30_000))).refused is None
    assert (await store.take([], Lease("ends", ("e",), 2, 30_000))).refused == 0
    await store.connection.aclose()


@UNHURRIED
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(-20, 30).filter(bool), st.sampled_from([1.0, 7.5, 20.0])),
        max_size=12,
    )
)
def test_both_stores_decide_alike(server: RedisProcess, steps: list[tuple[str, int, float]]) -> None:
    """At a rate so slow that the test's own time does not count: one in a minute, costs in whole numbers."""

    async def run() -> None:
        memory, redis = MemoryStore(Clock()), RedisStore(RedisConnection(server.url, deadline_s=10))
        async with Redis.from_url(server.url) as client:
            await client.flushall()
        for key, cost, capacity in steps:
            one = [Charge(key, "requests", cost, 1, capacity)]
            first, second = await memory.take(one, None), await redis.take(one, None)
            assert first.refused == second.refused
            assert second.wait_ms == pytest.approx(first.wait_ms, abs=10_000)
            assert second.until_full_ms == pytest.approx(first.until_full_ms, abs=10_000)
        await redis.connection.aclose()

    asyncio.run(run())


async def test_many_gateways_at_once_take_exactly_what_there_is(server: RedisProcess) -> None:
    stores = [RedisStore(RedisConnection(server.url, deadline_s=30)) for _ in range(4)]
    slow = Charge("shared", "requests", 1, 1, 25)
    taken = await asyncio.gather(*(stores[i % 4].take([slow], None) for i in range(100)))
    assert sum(one.refused is None for one in taken) == 25
    for one in stores:
        await one.connection.aclose()


async def test_nothing_is_left_behind_in_redis(server: RedisProcess) -> None:
    async with Redis.from_url(server.url) as client:
        await client.flushall()
        store = RedisStore(RedisConnection(server.url, deadline_s=10))
        lease = Lease("p", ("a",), 3, 30_000)
        await store.take([charge(5)], lease)
        assert sorted(await client.keys()) == [b"k", b"p"]
        assert 0 < await client.pttl("k") <= 51_000
        assert 0 < await client.pttl("p") <= 30_000
        await store.give_back([charge(-5)], lease)
        assert await client.keys() == []
        await store.connection.aclose()


async def test_memory_drops_buckets_that_are_full_again() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    for index in range(SWEEP_AT + 1):
        await store.take([charge(1, f"{index}")], None)
    clock.now += 3600
    await store.take([charge(1)], None)
    assert repr(store) == "<MemoryStore 1 buckets, 0 places taken>"


# --- a Redis that fails ----------------------------------------------------------------------------------------------


async def test_a_redis_that_hangs_is_left_at_the_deadline_and_its_late_answers_are_nobodys(tmp_path: Path) -> None:
    with redis_process(tmp_path) as running:
        store = RedisStore(RedisConnection(running.url))
        patient = RedisStore(RedisConnection(running.url, deadline_s=30))
        assert (await patient.take([charge(1, "a")], None)).refused is None
        running.freeze()
        calls = [store.take([charge(1, f"late-{index}", capacity=index + 1)], None) for index in range(20)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, StoreUnavailable)
        running.thaw()
        for index in range(20):
            taken = await patient.take([Charge(f"new-{index}", "requests", index + 1, 1, 100)], None)
            assert taken.until_full_ms == pytest.approx([(index + 1) * MINUTE_MS])
        await store.connection.aclose()
        await patient.connection.aclose()


async def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    with redis_process(tmp_path) as running:
        store = RedisStore(RedisConnection(running.url, deadline_s=30))
        await store.take([charge(1)], None)
        running.stop()
        port = int(running.url.rpartition(":")[2].partition("/")[0])
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.take([charge(1)], Lease("p", ("a",), 1, 1))
            with pytest.raises(StoreUnavailable):
                await store.give_back([charge(-1)], None)
        with redis_process(tmp_path, port):
            assert (await store.take([charge(1)], None)).refused is None
        await store.connection.aclose()


async def test_what_others_wrote_there_is_no_answer(server: RedisProcess) -> None:
    store = RedisStore(RedisConnection(server.url, deadline_s=10))
    async with Redis.from_url(server.url) as client:
        await client.set("k", "not a number")
        with pytest.raises(StoreUnavailable):
            await store.take([charge(1)], None)
        await client.flushall()
    await store.connection.aclose()


def test_what_is_no_url() -> None:
    with pytest.raises(ValueError, match="redis://"):
        RedisStore(RedisConnection("http://x"))
    assert "secret" not in repr(RedisStore(RedisConnection("redis://:secret@x")))


# --- the limiter -----------------------------------------------------------------------------------------------------


class Dead:
    """A store that never answers."""

    async def take(self, charges: object, lease: object) -> Taken:
        raise StoreUnavailable("TimeoutError")

    async def give_back(self, charges: object, lease: object) -> None:
        raise StoreUnavailable("TimeoutError")


LIMITS = Limits(
    requests=Rate(120, 1.0, "defaults"), tokens=Rate(60_000, 1.0, "defaults"), concurrency=Quota(3, "defaults")
)


async def test_a_request_holds_what_it_may_use_and_gives_back_what_it_did_not() -> None:
    limiter = Limiter(MemoryStore(Clock()))
    async with limiter.admit("acme", LIMITS, 2, Unavailable.DENY) as grant:
        assert grant.headers["x-ratelimit-limit-requests"] == "120"
        assert grant.headers["x-ratelimit-remaining-requests"] == "1"
        assert grant.headers["x-ratelimit-reset-requests"] == "500ms"
        await grant.take_tokens(100, 800)
        assert grant.headers["x-ratelimit-remaining-tokens"] == "100"
        assert grant.headers["x-ratelimit-reset-tokens"] == "900ms"
        async with limiter.admit("acme", LIMITS, 1, Unavailable.DENY) as other:
            with pytest.raises(RateLimited, match="60000 tokens per minute") as caught:
                await other.take_tokens(100, 100)
            assert caught.value.headers["retry-after"] == "1"
            assert caught.value.headers["x-ratelimit-remaining-tokens"] == "100"
        with pytest.raises(RateLimited, match="120 requests per minute"):
            async with limiter.admit("acme", LIMITS, 1, Unavailable.DENY):
                pass
        async with limiter.admit("other", LIMITS, 1, Unavailable.DENY):
            pass
        grant.use(50)
    async with limiter.admit("acme", Limits(tokens=LIMITS.tokens), 1, Unavailable.DENY) as grant:
        await grant.take_tokens(0, 850)
        assert grant.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_places_are_free_again_however_a_request_ends() -> None:
    store = MemoryStore(Clock())
    limiter = Limiter(store)
    limits = Limits(concurrency=Quota(3, "defaults"))
    with pytest.raises(ZeroDivisionError):
        async with limiter.admit("acme", limits, 3, Unavailable.DENY):
            assert "3 places taken" in repr(store)
            with pytest.raises(RateLimited, match="3 completions at a time is reached; this request needs 1"):
                async with limiter.admit("acme", limits, 1, Unavailable.DENY):
                    pass
            raise ZeroDivisionError
    assert "0 places taken" in repr(store)
    entered = asyncio.Event()

    async def run() -> None:
        async with limiter.admit("acme", limits, 1, Unavailable.DENY):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "0 places taken" in repr(store)


class HeldConnection(RedisConnection):
    """A connection whose batches of scripts wait until they are let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url, deadline_s=30)
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def _exchange(self, command: str, calls: list[Any]) -> list[Any]:
        self.reached.set()
        await self.go.wait()
        return await super()._exchange(command, calls)


@pytest.mark.parametrize("renews", [False, True])
async def test_no_place_is_taken_behind_its_giving_back(server: RedisProcess, renews: bool) -> None:
    """Whoever leaves while the store is asked for a place, or to renew one, holds none."""
    connection = HeldConnection(server.url)
    limiter = Limiter(RedisStore(connection), renew_every_s=0.01)
    limits = Limits(concurrency=Quota(1, "left"))
    await connection.redis.flushall()

    entered = asyncio.Event()

    async def run() -> None:
        async with limiter.admit("acme", limits, 1, Unavailable.DENY):
            connection.go.clear()
            connection.reached.clear()
            entered.set()
            await asyncio.Event().wait()

    if renews:
        connection.go.set()
    task = asyncio.create_task(run())
    if renews:
        await entered.wait()
    await connection.reached.wait()
    assert await left_behind(connection, task, "*") == []


async def left_behind(connection: HeldConnection, task: asyncio.Task[None], keys: str) -> list[bytes]:
    """Cancel a task whose call to Redis is held, let the call go; which keys are left when all that was called ran."""
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    connection.go.set()
    await asyncio.gather(task, return_exceptions=True)
    await connection.run(Script("return 1"), [], [])
    left: list[bytes] = await connection.redis.keys(keys)
    await connection.aclose()
    return left


class SlowStore(MemoryStore):
    """Takes and gives back, and tells only when it is let go."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def take(self, charges: Sequence[Charge], lease: Lease | None) -> Taken:
        taken = await super().take(charges, lease)
        self.reached.set()
        await self.go.wait()
        return taken


async def test_who_leaves_while_tokens_are_taken_gives_them_back() -> None:
    store = SlowStore()
    limiter = Limiter(store)
    limits = Limits(tokens=Rate(60_000, 1.0, "left"))

    async def run(answer: int) -> None:
        async with limiter.admit("acme", limits, 1, Unavailable.DENY) as grant:
            await grant.take_tokens(10, answer)

    # The second one is refused, and must not give back what it did not get.
    for answer in (890, 1000):
        store.reached.clear()
        store.go.clear()
        task = asyncio.create_task(run(answer))
        await store.reached.wait()
        task.cancel()
        await asyncio.sleep(0)
        store.go.set()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        nothing = Charge("verbatim:{acme}:tokens:left", "tokens", 0, 60_000, 1000)
        assert (await store.take([nothing], None)).until_full_ms == (10,), "those of the prompt"


async def test_who_leaves_at_its_end_still_gives_back_its_place(server: RedisProcess) -> None:
    """A client that has read all it wants may go while what it held is being given back."""
    connection = HeldConnection(server.url)
    limiter = Limiter(RedisStore(connection))
    limits = Limits(tokens=Rate(60_000, 60.0, "end"), concurrency=Quota(1, "end"))
    await connection.redis.flushall()

    async def run() -> None:
        async with limiter.admit("acme", limits, 1, Unavailable.DENY) as grant:
            await grant.take_tokens(10, 890)
            connection.go.clear()
            connection.reached.clear()
            ending.set()

    ending = asyncio.Event()
    connection.go.set()
    task = asyncio.create_task(run())
    await ending.wait()
    await connection.reached.wait()
    assert await left_behind(connection, task, "*:places:*") == []


async def test_a_lease_is_renewed_while_its_request_runs(server: RedisProcess) -> None:
    store = RedisStore(RedisConnection(server.url, deadline_s=30))
    limiter = Limiter(store, lease_ttl_s=0.5, renew_every_s=0.01)
    limits = Limits(concurrency=Quota(1, "renewed"))
    async with Redis.from_url(server.url) as client:
        await client.flushall()
        async with limiter.admit("acme", limits, 1, Unavailable.DENY):
            ((member, ends),) = await client.zrange("verbatim:{acme}:places:renewed", 0, -1, withscores=True)
            while (later := await client.zscore("verbatim:{acme}:places:renewed", member)) == ends:
                pass
            assert later is not None
            assert later > ends
        assert await client.keys() == []
    await store.connection.aclose()


async def test_while_nobody_can_count_the_policys_word_holds(caplog: pytest.LogCaptureFixture) -> None:
    limiter = Limiter(Dead())
    with pytest.raises(LimitsUnavailable) as caught:
        async with limiter.admit("acme", LIMITS, 1, Unavailable.DENY):
            pass
    assert caught.value.headers == {"retry-after": "1"}
    async with limiter.admit("acme", LIMITS, 1, Unavailable.ALLOW) as grant:
        await grant.take_tokens(10, 10)
        assert grant.headers == {}
    assert limiter.unanswered == 4  # the lease was tried to be given back too
    assert len(caplog.records) == 1
    async with limiter.admit("acme", Limits(), 1, Unavailable.DENY) as grant:  # nothing to count
        await grant.take_tokens(10, 10)


@pytest.mark.parametrize(
    ("ms", "said"),
    [(0, "0ms"), (0.2, "1ms"), (999, "999ms"), (1500, "1.5s"), (59_999, "1m0s"), (360_000, "6m0s"), (61_501, "1m1.6s")],
)
def test_durations_are_written_as_openai_does(ms: float, said: str) -> None:
    assert duration(ms) == said
