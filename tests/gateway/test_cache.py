"""The commit log behind the gateway: an answer out of it is the answer there would have been, to the last byte."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launched import Gateway, launch_gateway, launch_models
from redis.asyncio import Redis
from redis_process import RedisProcess, redis_process
from toy_backend import Drop, Fault, Hang, Status, ToyBackend, Wait, on
from toy_model import float32, ids

from backend.protocol import Sampling, VerifiedToken, VerifyRequest
from gateway.breaker import THRESHOLD
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.flight import Keeping
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.redis import RedisLogs
from gateway.commit_log.sealing import Checked, Encrypted, Sealer
from gateway.domain import Commit, Counts, Job, Progress, Token
from gateway.errors import BackendFailed
from gateway.models_file import ModelConfig
from gateway.redis_connection import RedisConnection
from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy

VERIFY = "/v1/verify"
DECODING = ("draft", "verify", "decode")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


POLICY = "version: 1\nanonymous: a\ntenants: {{a: {{determinism: {{mode: verified}}}}}}\ndefaults: {{cache: {cache}}}\n"


def policy(cache: str = "{scope: tenant}") -> FixedPolicy:
    return FixedPolicy(load_policy(POLICY.format(cache=cache), "policy.yaml"))


def caching(url: str, cache: str = "{scope: tenant}", **more: Any) -> Any:
    return launch_gateway(url, policies=policy(cache), **more)


def answer(response: httpx.Response) -> Any:
    """What must not depend on the log: all of an answer but the time."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json() | {"created": None}
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", response.text
    items = [json.loads(line.removeprefix("data: ")) | {"created": None} for line in lines[:-1]]
    # Which of several choices is ahead is chance.
    return sorted(items, key=lambda item: [choice["index"] for choice in item["choices"]])


async def begin(gateway: Gateway, **fields: Any) -> httpx.Response:
    """A stream of which the first token has come."""
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    return await gateway.http.send(gateway.http.build_request("POST", "/v1/chat/completions", json=body), stream=True)


def cache(response: httpx.Response) -> str:
    return str(response.headers["x-verbatim-cache"])


async def fresh(**fields: Any) -> Any:
    """The answer of a gateway that keeps nothing."""
    async with ToyBackend() as toy, launch_gateway(toy.url, policies=policy("{scope: none}")) as gateway:
        response = await gateway.chat(**fields)
        assert cache(response) == "off"
        return answer(response)


# --- hits and views --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [("draft", "verify"), DECODING])
async def test_the_second_time_it_comes_out_of_the_log(toy: ToyBackend, roles: tuple[str, ...]) -> None:
    toy.roles = roles
    async with caching(toy.url) as gateway:
        first = await gateway.chat(max_tokens=40, logprobs=True)
        calls = toy.calls.copy()
        second = await gateway.chat(max_tokens=40, logprobs=True)
        assert (cache(first), cache(second)) == ("lead", "hit")
        assert answer(first) == answer(second) == await fresh(max_tokens=40, logprobs=True)
        assert toy.calls == calls
        assert set(first.headers) == set(second.headers)


VIEWS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 40)},
    optional={
        "stream": st.just(True),
        "n": st.integers(1, 3),
        "logprobs": st.just(True),
        "stop": st.lists(st.sampled_from(["a", "ab", "\u00e9", "z", "Q7"]), min_size=1, max_size=2),
        "top_logprobs": st.integers(0, 4),
        "seed": st.integers(1, 2),
        "temperature": st.sampled_from([0, 1]),
    },
).map(lambda view: view | ({"logprobs": True} if "top_logprobs" in view else {}))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(VIEWS, min_size=2, max_size=6))
async def test_no_view_shows_whether_the_log_was_there(views: list[dict[str, Any]]) -> None:
    async with (
        ToyBackend() as toy,
        launch_gateway(toy.url, policies=policy("{scope: none}")) as plain,
        caching(toy.url) as gateway,
    ):
        for view in views:
            assert answer(await gateway.chat(**view)) == answer(await plain.chat(**view)), view
        calls = toy.calls.copy()
        repeated = await gateway.chat(**views[-1])
        assert (cache(repeated), toy.calls) == ("hit", calls)


async def test_a_longer_answer_goes_on_where_the_log_ends(toy: ToyBackend) -> None:
    async with caching(toy.url) as gateway:
        await gateway.chat(max_tokens=20)
        toy.requests.clear()
        longer = await gateway.chat(max_tokens=45)
        assert (cache(longer), answer(longer)) == ("lead", await fresh(max_tokens=45))
        assert all(request.generated >= 20 for request in toy.requests)  # type: ignore[attr-defined]
        assert cache(await gateway.chat(max_tokens=7)) == "hit"


async def test_more_alternatives_are_verified_rather_than_generated(toy: ToyBackend) -> None:
    asked = {"max_tokens": 61, "logprobs": True}
    async with caching(toy.url) as gateway:
        await gateway.chat(**asked)
        toy.calls.clear()
        more = await gateway.chat(**asked, top_logprobs=3)
        assert answer(more) == await fresh(**asked, top_logprobs=3)
        assert (toy.calls["/v1/draft"], toy.calls[VERIFY]) == (0, 4), "61 tokens in windows of 15 and one"
        assert cache(await gateway.chat(**asked, top_logprobs=2)) == "hit"
        assert cache(await gateway.chat(**asked)) == "hit"


async def test_an_answer_that_a_stop_string_ended_is_a_hit(toy: ToyBackend) -> None:
    toy.model.script = ids("One, two, three, four, five, six, seven, eight.")
    async with caching(toy.url) as gateway:
        first = await gateway.chat(stop=["thr"])
        calls = toy.calls.copy()
        second = await gateway.chat(stop=["thr"])
        streamed = await gateway.chat(stop=[", two"], stream=True)
        assert (cache(first), cache(second), cache(streamed)) == ("lead", "hit", "hit")
        assert (answer(first), toy.calls) == (answer(second), calls)
        assert first.json()["choices"][0]["message"]["content"] == "One, two, "
        assert cache(await gateway.chat(stop=["eig"])) == "lead"


async def test_an_ended_answer_is_whole_for_any_length(toy: ToyBackend) -> None:
    toy.model.script = ids("The end.")
    async with caching(toy.url) as gateway:
        first = await gateway.chat(max_tokens=20)
        second = await gateway.chat(max_tokens=200)
        assert (cache(second), second.json()["choices"]) == ("hit", first.json()["choices"])
        assert second.json()["choices"][0]["finish_reason"] == "stop"


async def test_completions_share_the_log_and_mode_off_does_not(toy: ToyBackend) -> None:
    async with caching(toy.url) as gateway:
        prompt = {"prompt": "Once", "max_tokens": 9}
        assert [cache(await gateway.complete(**prompt)) for _ in range(2)] == ["lead", "hit"]
        listed = await gateway.complete(prompt=["Once", "Twice"], max_tokens=9)
        assert cache(listed) == "lead", "one of the two was not there"
        off = [cache(await gateway.complete(**prompt, is_deterministic=False)) for _ in range(2)]
        assert off == ["off", "off"]


# --- who reads what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "expected"), [("tenant", "lead"), ("shared", "hit"), ("none", "off")])
async def test_tenants_share_nothing_unless_the_policy_says_so(toy: ToyBackend, scope: str, expected: str) -> None:
    keys = [new_key() for _ in range(2)]
    text = (
        f"version: 1\ndefaults: {{determinism: {{mode: verified}}, cache: {{scope: {scope}}}}}\ntenants:\n"
        + "".join(f"  t{i}: {{keys: [{{id: '{kept.id}', hash: '{kept.hash}'}}]}}\n" for i, (_, kept) in enumerate(keys))
    )
    async with launch_gateway(toy.url, policies=FixedPolicy(load_policy(text, "p.yaml"))) as gateway:
        one, other = ({"authorization": f"Bearer {key}"} for key, _ in keys)
        first = await gateway.chat(one, max_tokens=9)
        second = await gateway.chat(other, max_tokens=9)
        assert cache(second) == expected
        assert answer(first) == answer(second)


@pytest.mark.parametrize(
    ("said", "policy_says", "expected"),
    [
        ("no-cache", "{scope: tenant}", ["lead", "lead"]),
        ("max-age=0, No-Cache", "{scope: tenant}", ["lead", "lead"]),
        ("no-store", "{scope: tenant}", ["off", "off"]),
        ("no-store", "{scope: tenant, from_client: false}", ["lead", "hit"]),
        ("max-age=0", "{scope: tenant}", ["lead", "hit"]),
        ("", "{scope: tenant, write: false}", ["lead", "lead"]),
        ("", "{scope: tenant, read: false}", ["lead", "lead"]),
        ("", "{scope: tenant, read: false, write: false}", ["off", "off"]),
    ],
)
async def test_cache_control_and_the_policys_word(
    toy: ToyBackend, said: str, policy_says: str, expected: list[str]
) -> None:
    async with caching(toy.url, policy_says) as gateway:
        responses = [await gateway.chat({"cache-control": said}, max_tokens=5) for _ in range(2)]
        assert [cache(response) for response in responses] == expected
        assert answer(responses[0]) == answer(responses[1])


async def test_cache_control_may_stand_in_several_lines(toy: ToyBackend) -> None:
    lines = [("cache-control", "no-transform"), ("cache-control", "no-store")]
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    async with caching(toy.url) as gateway:
        response = await gateway.http.post("/v1/chat/completions", json=body, headers=lines)
        assert cache(response) == "off"


async def test_what_no_cache_generates_is_kept_and_compared(toy: ToyBackend) -> None:
    async with caching(toy.url) as gateway:
        await gateway.chat({"cache-control": "no-cache"}, max_tokens=20)
        assert cache(await gateway.chat(max_tokens=20)) == "hit"
        seen = contradict(toy)
        response = await gateway.chat({"cache-control": "no-cache"}, max_tokens=20)
        assert (response.status_code, seen) == (502, [True])


async def test_time_and_size_are_the_policys(toy: ToyBackend) -> None:
    clock = Clock()
    log = CommitLog(MemoryLogs(1 << 20, clock))
    async with caching(toy.url, "{scope: tenant, ttl_s: 60, max_tokens: 10}", commit_log=log) as gateway:
        await gateway.chat(max_tokens=20)
        assert cache(await gateway.chat(max_tokens=11)) == "lead"
        assert cache(await gateway.chat(max_tokens=10)) == "hit"
        clock.now = 61
        assert cache(await gateway.chat(max_tokens=10)) == "lead"


# --- at the same time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("roles", [("draft", "verify"), DECODING])
async def test_six_at_once_are_generated_once(toy: ToyBackend, stream: bool, roles: tuple[str, ...]) -> None:
    toy.roles = roles
    gate = asyncio.Event()
    toy.faults = on("/v1/decode" if "decode" in roles else VERIFY, Wait(gate), nth=0)
    async with caching(toy.url) as gateway:
        asking = [asyncio.create_task(gateway.chat(max_tokens=30 - i, stream=stream)) for i in range(6)]
        await toy.hung.acquire()
        gate.set()
        responses = await asyncio.gather(*asking)
        assert sorted(map(cache, responses))[-1] == "lead" and list(map(cache, responses)).count("lead") == 1
        for i, response in enumerate(responses):
            assert answer(response) == await fresh(max_tokens=30 - i, stream=stream)
        calls = toy.calls.copy()
        toy.calls.clear()
        assert cache(await gateway.chat(max_tokens=30, seed=7)) == "lead"
        # Who came first may have wanted less than a later one: then there is a second run behind the first.
        assert calls[VERIFY] <= toy.calls[VERIFY] + 2 and calls["/v1/decode"] <= toy.calls["/v1/decode"] + 1


async def test_whoever_generates_may_leave(toy: ToyBackend) -> None:
    gate = asyncio.Event()
    toy.faults = on(VERIFY, Wait(gate), nth=1)
    async with caching(toy.url) as gateway:
        leader = asyncio.create_task(gateway.chat(max_tokens=30))
        await toy.hung.acquire()
        response = await begin(gateway, max_tokens=30)
        leader.cancel()
        await asyncio.gather(leader, return_exceptions=True)
        gate.set()
        await response.aread()
        assert (cache(response), answer(response)) == ("follow", await fresh(max_tokens=30, stream=True))


async def test_when_all_have_left_the_calls_end(toy: ToyBackend) -> None:
    toy.faults = on(VERIFY, Hang(), nth=1)
    async with caching(toy.url) as gateway:
        asking = [asyncio.create_task(gateway.chat(max_tokens=30)) for _ in range(2)]
        await toy.hung.acquire()
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await toy.left.acquire()
        response = await gateway.chat(max_tokens=30)
        assert (cache(response), answer(response)) == ("lead", await fresh(max_tokens=30))


@pytest.mark.parametrize("fault", [Status(400), Status(500), Drop()])
async def test_all_hear_of_an_error_and_the_next_tries_again(toy: ToyBackend, fault: Fault) -> None:
    gate = asyncio.Event()
    toy.faults = lambda path, nth: {0: Wait(gate), 1: fault}.get(nth) if path == VERIFY else None
    async with caching(toy.url) as gateway:
        asking = [asyncio.create_task(gateway.chat(max_tokens=30)) for _ in range(2)]
        await toy.hung.acquire()
        gate.set()
        responses = await asyncio.gather(*asking)
        assert {response.status_code for response in responses} == {400 if fault == Status(400) else 502}
        response = await gateway.chat(max_tokens=30)
        assert answer(response) == await fresh(max_tokens=30)


async def test_a_log_evicted_while_it_is_generated_is_whole_in_the_end(toy: ToyBackend) -> None:
    gate = asyncio.Event()
    toy.faults = on(VERIFY, Wait(gate), nth=2)
    async with caching(toy.url) as gateway:
        asking = asyncio.create_task(gateway.chat(max_tokens=30))
        await toy.hung.acquire()
        memory = gateway.log.stores.memory
        for key in list(memory._logs):
            memory.drop(key)
        gate.set()
        first = await asking
        second = await gateway.chat(max_tokens=30)
        assert (cache(second), answer(second)) == ("hit", answer(first))


class Failing:
    """Generates two tokens and breaks, the first time."""

    runs = 0

    async def generate(self, job: Job, committed: Sequence[int], recorded: Sequence[int]) -> AsyncGenerator[Progress]:
        self.runs += 1
        if self.runs == 1:
            yield Commit((Token(1, -1.0), Token(2, -2.0)), Counts())
            raise BackendFailed("it broke")
        yield Commit(tuple(Token(id_, -float(id_)) for id_ in range(1 + len(committed), 6)), Counts())

    def quarantine(self) -> bool:
        return False


async def test_who_comes_after_an_error_does_not_get_it_from_a_slow_reader() -> None:
    log, job, generator = CommitLog(MemoryLogs(1 << 20, Clock())), Job((1,), Sampling(), 5, (9,), 0), Failing()
    keeping = Keeping(True, True, 60, None)

    def opened() -> Any:
        return log.open("t", "f", job, keeping, generator, lambda _: job.max_tokens)

    async with opened() as slow:
        steps = slow.progress()
        assert [token.id for token in (await anext(steps)).tokens] == [1, 2]
        with pytest.raises(BackendFailed):
            await anext(steps)
        async with opened() as late:
            ids_ = [token.id async for step in late.progress() if isinstance(step, Commit) for token in step.tokens]
        assert (late.source, ids_, generator.runs) == ("lead", [1, 2, 3, 4, 5], 2)


# --- contradictions --------------------------------------------------------------------------------------------------


def contradict(toy: ToyBackend) -> list[bool]:
    """From now on one logprob differs in its last bit."""
    seen: list[bool] = []
    honest = toy.model.next

    def wrong(context: list[int], generated: int, sampling: Sampling, top: int = 0) -> VerifiedToken:
        token = honest(context, generated, sampling, top)
        if generated != 12:
            return token
        seen[:] = [True]
        return VerifiedToken(token.id, float32(token.logprob * (1 + 2**-22) - 2**-20), token.top)

    toy.model.next = wrong  # type: ignore[method-assign]
    return seen


async def test_a_replica_that_contradicts_the_log_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        toys = [await stack.enter_async_context(ToyBackend()) for _ in range(2)]
        config = ModelConfig(None, tuple(toy.url for toy in toys))
        gateway = await stack.enter_async_context(launch_models((config,), policies=policy()))
        await gateway.chat(max_tokens=20)
        assert toys[0].calls[VERIFY] > 0 == toys[1].calls[VERIFY]
        seen = contradict(toys[0])
        response = await gateway.chat({"cache-control": "no-cache"}, max_tokens=20, logprobs=True)
        assert (answer(response), seen) == (await fresh(max_tokens=20, logprobs=True), [True])
        assert gateway.log.stores.conflicts == 1
        assert "broke its guarantee" in caplog.text
        (group,) = gateway.models.groups
        await gateway.check()
        assert [replica.trouble for replica in group.replicas] == ["it contradicted tokens that stand", None]
        calls = toys[0].calls[VERIFY]
        answer(await gateway.chat(max_tokens=9, seed=3))
        assert toys[0].calls[VERIFY] == calls


# --- gateways that share a Redis -------------------------------------------------------------------------------------


@pytest.fixture
async def redis(server: RedisProcess) -> AsyncIterator[RedisProcess]:
    async with Redis.from_url(server.url) as client:
        await client.flushall()
    yield server


SEALERS = [Checked(), Encrypted([bytes(range(32))])]


@asynccontextmanager
async def sharing(
    toy: ToyBackend,
    redis: RedisProcess,
    *,
    deadline_s: float = 10,
    lease_ms: int = 3000,
    clock: Clock | None = None,
    sealer: Sealer | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway whose own memory keeps nothing."""
    shared = RedisLogs(RedisConnection(redis.url, deadline_s), clock or Clock(), lease_ms, sealer)
    async with caching(toy.url, commit_log=CommitLog(MemoryLogs(0, Clock()), shared)) as gateway:
        yield gateway
    await shared.connection.aclose()


async def test_what_one_gateway_kept_another_one_has(toy: ToyBackend, redis: RedisProcess) -> None:
    asked = {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "n": 2}
    async with sharing(toy, redis) as one, sharing(toy, redis) as other:
        first = await one.chat(**asked)
        calls = toy.calls.copy()
        second = await other.chat(**asked)
        assert (cache(first), cache(second), toy.calls) == ("lead", "hit", calls)
        assert answer(first) == answer(second) == await fresh(**asked)
        longer = await other.chat(**asked | {"max_tokens": 50})
        assert (cache(longer), answer(longer)) == ("lead", await fresh(**asked | {"max_tokens": 50}))


async def test_gateways_generate_once(toy: ToyBackend, redis: RedisProcess) -> None:
    gate = asyncio.Event()
    toy.faults = on(VERIFY, Wait(gate), nth=1)
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(sharing(toy, redis)) for _ in range(3)]
        responses = [await begin(gateway, max_tokens=30) for gateway in gateways for _ in range(3)]
        assert [cache(response) for response in responses] == ["lead"] + ["follow"] * 8
        gate.set()
        for response in responses:
            await response.aread()
        expected = await fresh(max_tokens=30, stream=True)
        assert all(answer(response) == expected for response in responses)
        calls = toy.calls[VERIFY]
        await gateways[0].chat(max_tokens=30, seed=7)
        assert toy.calls[VERIFY] == 2 * calls


async def test_a_follower_takes_over_where_the_leader_died(toy: ToyBackend, redis: RedisProcess) -> None:
    toy.faults = on(VERIFY, Hang(), nth=2)
    async with sharing(toy, redis, lease_ms=100) as leading, sharing(toy, redis, lease_ms=100) as following:
        dying = asyncio.create_task(leading.chat(max_tokens=30))
        await toy.hung.acquire()
        response = await begin(following, max_tokens=30)
        # As if it had died: it says nothing any more, not even that it gives its lease back.
        silent = leading.log.stores.shared
        assert silent is not None
        for _ in range(THRESHOLD):
            silent._breaker.failed(0)
        toy.requests.clear()
        await response.aread()
        assert (cache(response), answer(response)) == ("follow", await fresh(max_tokens=30, stream=True))
        verified = [request for request in toy.requests if isinstance(request, VerifyRequest)]
        assert min(request.generated for request in verified) > 1, "not from the beginning"
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)


async def test_many_clients_of_many_gateways_come_and_leave_and_every_answer_is_right(
    toy: ToyBackend, redis: RedisProcess
) -> None:
    chance = random.Random(7)
    views: list[dict[str, Any]] = [
        {"seed": chance.randrange(3), "max_tokens": chance.randrange(1, 40), "stream": chance.random() < 0.5}
        | ({"logprobs": True, "top_logprobs": chance.choice([0, 2])} if chance.random() < 0.4 else {})
        | ({"stop": ["a"]} if chance.random() < 0.2 else {})
        for _ in range(120)
    ]
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(launch_gateway(toy.url, policies=policy("{scope: none}")))
        expected = [answer(await plain.chat(**view)) for view in views]
        gateways = [await stack.enter_async_context(sharing(toy, redis, lease_ms=300)) for _ in range(3)]
        calls = toy.calls[VERIFY]
        slots = asyncio.Semaphore(24)

        async def ask(index: int) -> None:
            async with slots:
                asking = asyncio.create_task(gateways[index % 3].chat(**views[index]))
                if index % 5 == 0:
                    await asyncio.wait([asking], timeout=0.01)
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                else:
                    assert answer(await asking) == expected[index], views[index]

        await asyncio.gather(*map(ask, range(len(views))))
        await asyncio.gather(*(gateway.models.admission.wait_idle() for gateway in gateways))
        assert toy.calls[VERIFY] - calls < calls, "less than without a log"
        logs = [gateway.log for gateway in gateways]
        assert [len(log._flights) for log in logs] == [0] * 3
        assert sum(log.stores.conflicts for log in logs) == 0
        async with Redis.from_url(redis.url) as client:
            assert not await client.keys("*:lead:*"), "all leases were given back"


@asynccontextmanager
async def gateway_process(
    toy: ToyBackend, redis: RedisProcess, policy_file: Path, *flags: str
) -> AsyncIterator[tuple[str, Any]]:
    """A gateway that can be killed: its base URL, and the process."""
    options = {"--backend": toy.url, "--port": "0", "--policy": str(policy_file), "--redis": redis.url}
    argv = ["-m", "gateway.cli", "gateway", *(word for option in options.items() for word in option), *flags]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=PIPE, stderr=STDOUT)
    try:
        assert process.stdout is not None
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said)):
            line = await process.stdout.readline()
            assert line, said
            said += line.decode()
        yield found[0], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_when_a_gateway_is_killed_clients_of_another_one_get_the_rest(
    toy: ToyBackend, redis: RedisProcess, tmp_path: Path
) -> None:
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text(POLICY.format(cache="{scope: tenant}"))
    toy.faults = on(VERIFY, Hang(), nth=2)
    asked = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True}
    async with (
        gateway_process(toy, redis, policy_file) as (doomed_url, doomed),
        gateway_process(toy, redis, policy_file) as (other_url, _),
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):

        async def start(url: str) -> httpx.Response:
            return await http.send(http.build_request("POST", url + "/v1/chat/completions", json=asked), stream=True)

        broken = await start(doomed_url)
        followers = [await start(other_url) for _ in range(4)]
        assert [cache(response) for response in (broken, *followers)] == ["lead"] + ["follow"] * 4
        await toy.hung.acquire()
        toy.requests.clear()
        doomed.kill()
        for response in followers:
            await response.aread()
        with pytest.raises(httpx.RemoteProtocolError):
            await broken.aread()
        expected = await fresh(max_tokens=40, stream=True)
        assert all(answer(response) == expected for response in followers)
        verified = [request for request in toy.requests if isinstance(request, VerifyRequest)]
        assert min(request.generated for request in verified) > 1, "not from the beginning"
        assert len({request.generated for request in verified}) == len(verified), "each part once"


async def test_a_gateway_that_is_stopped_hands_its_streams_over(
    toy: ToyBackend, redis: RedisProcess, tmp_path: Path
) -> None:
    """Its own clients are told when its time is up; another gateway's followers go on where it ended, and so does who
    asks again there."""
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text(POLICY.format(cache="{scope: tenant}"))
    toy.faults = on(VERIFY, Hang(), nth=2)
    asked = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True}
    async with (
        gateway_process(toy, redis, policy_file, "--drain-timeout-s", "0.2") as (stopping_url, stopping),
        gateway_process(toy, redis, policy_file) as (other_url, _),
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):

        async def start(url: str) -> httpx.Response:
            return await http.send(http.build_request("POST", url + "/v1/chat/completions", json=asked), stream=True)

        leading, following = await start(stopping_url), await start(other_url)
        assert [cache(response) for response in (leading, following)] == ["lead", "follow"]
        await toy.hung.acquire()
        toy.requests.clear()
        stopping.terminate()
        told = (await leading.aread()).decode().strip().split("\n\n")
        assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        await following.aread()
        again = await start(other_url)
        await again.aread()
        expected = await fresh(max_tokens=40, stream=True)
        assert answer(following) == answer(again) == expected
        said = [json.loads(event.removeprefix("data: ")) | {"created": None} for event in told[:-1]]
        assert said and said == expected[: len(said)]
        verified = [request for request in toy.requests if isinstance(request, VerifyRequest)]
        assert min(request.generated for request in verified) > 1, "not from the beginning"
        assert len({request.generated for request in verified}) == len(verified), "each part once"
        assert await stopping.wait() == 0


@pytest.mark.parametrize("sealer", SEALERS)
async def test_requests_go_on_whatever_becomes_of_redis(toy: ToyBackend, tmp_path: Path, sealer: Sealer) -> None:
    expected = await fresh(max_tokens=30)
    gate = asyncio.Event()
    clock = Clock()
    with redis_process(tmp_path) as running:
        port = int(running.url.split(":")[-1].split("/")[0])
        async with sharing(toy, running, deadline_s=0.1, clock=clock, sealer=sealer) as gateway:
            shared = gateway.log.stores.shared
            assert shared is not None
            toy.faults = on(VERIFY, Wait(gate), nth=1)
            asking = asyncio.create_task(gateway.chat(max_tokens=30))
            await toy.hung.acquire()
            running.freeze()
            gate.set()
            assert answer(await asking) == expected, "frozen in the middle"
            for _ in range(5):
                assert answer(await gateway.chat(max_tokens=30)) == expected, "frozen"
            assert 0 < shared.unanswered <= 4
            running.stop()
            assert answer(await gateway.chat(max_tokens=30)) == expected, "dead"
            with redis_process(tmp_path, port) as restarted:
                shared.connection._deadline_s = 30
                clock.now += 100
                assert answer(await gateway.chat(max_tokens=30)) == expected, "restarted empty"
                assert cache(await gateway.chat(max_tokens=30)) == "hit"
                async with Redis.from_url(restarted.url) as client:
                    gate = asyncio.Event()
                    toy.faults = on(VERIFY, Wait(gate), nth=toy.calls[VERIFY] + 2)
                    asking = asyncio.create_task(gateway.chat(max_tokens=50, seed=2))
                    await toy.hung.acquire()
                    await client.flushall()
                    gate.set()
                    assert answer(await asking) == await fresh(max_tokens=50, seed=2), "emptied in the middle"
                    response = await gateway.chat(max_tokens=50, seed=2)
                    assert (cache(response), answer(response)) == ("hit", await fresh(max_tokens=50, seed=2))


@pytest.mark.parametrize("damage", ["bit", "type", "cut", "foreign", "full", "other key"])
@pytest.mark.parametrize("sealer", SEALERS)
async def test_nothing_wrong_is_served_out_of_redis(
    toy: ToyBackend, redis: RedisProcess, damage: str, sealer: Sealer
) -> None:
    asked = {"max_tokens": 30, "logprobs": True}
    async with sharing(toy, redis, sealer=sealer) as gateway, Redis.from_url(redis.url) as client:
        await gateway.chat(**asked)
        await gateway.chat(**asked, seed=9)
        (name, other) = sorted(await client.keys("verbatim:log:*"))
        match damage:
            case "bit":
                entry = bytearray(await client.lindex(name, 1))
                entry[-1] ^= 4
                await client.lset(name, 1, bytes(entry))
            case "type":
                await client.set(name, b"something else")
            case "cut":
                await client.ltrim(name, 0, 0)
            case "foreign":
                await client.copy(other, name, replace=True)
            case "other key":
                shared = gateway.log.stores.shared
                assert shared is not None
                shared._sealer = Encrypted([bytes(32)])
            case "full":
                await client.config_set("maxmemory", 1)
        try:
            for seed in (42, 9):
                for _ in range(2):
                    assert answer(await gateway.chat(**asked, seed=seed)) == await fresh(**asked, seed=seed)
            assert gateway.log.stores.conflicts == 0
            assert answer(await gateway.chat(max_tokens=31)) == await fresh(max_tokens=31)
        finally:
            await client.config_set("maxmemory", 0)
