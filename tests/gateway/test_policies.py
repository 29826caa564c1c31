"""The gateway obeys its policy: over HTTP, with the toy backend behind it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from launched import Gateway, launch_gateway, launch_models
from redis.asyncio import Redis
from redis_process import RedisProcess, redis_process
from toy_backend import Hang, ToyBackend, on

from backend.protocol import StreamRequest, VerifyRequest
from gateway.cli import main
from gateway.limits.redis import RedisStore
from gateway.models_file import ModelConfig
from gateway.redis_connection import RedisConnection
from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy
from policies.policy_file import PolicyFile

ANYBODY = "version: 1\nanonymous: a\n"


def fixed(text: str) -> FixedPolicy:
    return FixedPolicy(load_policy(text, "policy.yaml"))


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def entry(kept: object) -> str:
    return f'{{id: "{kept.id}", hash: "{kept.hash}"}}'  # type: ignore[attr-defined]


def error(response: httpx.Response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    found: dict[str, object] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


# --- modes and labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "batching"), [("off", "dynamic"), ("batch_invariant", "invariant"), ("batch_of_one", "none")]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_modes_that_no_verifier_sees(
    toy: ToyBackend, gateway: Gateway, mode: str, batching: str, stream: bool
) -> None:
    response = await gateway.chat({"X-Verbatim-Determinism": mode}, max_tokens=3, stream=stream)
    assert response.status_code == 200
    assert response.headers["x-verbatim-determinism"] == mode
    assert "x-verbatim-windows" not in response.headers and "windows=" not in response.text
    (request,) = toy.requests
    assert isinstance(request, StreamRequest)
    assert request.batching == batching
    if mode != "off":
        assert request.sampling.seed == 42


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_says_which_rule_decided_and_under_which_policy(toy: ToyBackend, stream: bool) -> None:
    policy = fixed(ANYBODY + "tenants: {a: {determinism: {mode: verified}}}\nmodels: {'t\u00f6y \"*': {}}\n")
    async with launch_gateway(toy.url, policies=policy) as gateway:
        default = await gateway.chat(max_tokens=2, stream=stream)
        asked = await gateway.chat(max_tokens=2, stream=stream, is_deterministic=False)
        assert default.headers["x-verbatim-rule"] == "tenants.a.determinism.mode"
        assert asked.headers["x-verbatim-rule"] == "built-in.determinism.allow"
        assert default.headers["x-verbatim-policy"] == policy.current.version
        assert "x-verbatim-degraded" not in default.headers


async def test_the_name_of_a_rule_fits_into_a_header(toy: ToyBackend) -> None:
    policy = fixed(
        ANYBODY + "tenants: {a: {}}\nmodels: {\"t\u00f6\\n*\": {}, 'to*': {determinism: {mode: verified}}}\n"
    )
    async with launch_gateway(toy.url, policies=policy) as gateway:
        response = await gateway.chat(max_tokens=2)
        assert response.headers["x-verbatim-rule"] == 'models."to*".determinism.mode'


async def test_what_may_not_be_asked_for(toy: ToyBackend) -> None:
    policy = fixed(
        ANYBODY
        + "tenants: {a: {determinism: {mode: verified, allow: [verified]}, sampling: {temperature: {max: 0.5}},"
        + " limits: {max_tokens: 5, prompt_tokens: 40}}}\n"
    )
    async with launch_gateway(toy.url, policies=policy) as gateway:
        for fields, param in (
            ({"is_deterministic": False}, "is_deterministic"),
            ({"temperature": 0.6}, "temperature"),
            ({"max_tokens": 6}, "max_tokens"),
            ({"max_completion_tokens": 6}, "max_completion_tokens"),
            ({"messages": [{"role": "user", "content": "x" * 50}]}, "messages"),
            ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ):
            found = error(await gateway.chat(**fields), 403)
            assert (found["type"], found["param"], found["code"]) == ("invalid_request_error", param, "not_allowed")
        found = error(await gateway.chat({"X-Verbatim-Determinism": "batch_of_one"}), 403)
        assert found["param"] == "X-Verbatim-Determinism"
        assert not toy.requests
        # What is left open is the policy's.
        answer = await gateway.chat()
        assert answer.json()["usage"]["completion_tokens"] == 5
        request = toy.requests[0]
        assert isinstance(request, VerifyRequest)
        assert request.sampling.temperature == 0.5


async def test_a_seed_of_the_clients_counts_only_where_the_policy_lets_it(toy: ToyBackend) -> None:
    policy = fixed(ANYBODY + "tenants: {a: {seed: {default: 7, from_client: false}}}")
    async with launch_gateway(toy.url, policies=policy) as gateway:
        response = await gateway.chat(max_tokens=2, seed=1, is_deterministic=True)
        assert response.headers["x-verbatim-seed"] == "7"


@pytest.mark.parametrize("word", ["refuse", "degrade"])
async def test_without_a_verifier_the_policys_word_holds(toy: ToyBackend, word: str) -> None:
    toy.roles = ("draft",)
    policy = fixed(ANYBODY + f"tenants: {{a: {{determinism: {{no_verifier: {word}}}}}}}")
    async with launch_gateway(toy.url, policies=policy) as gateway:
        response = await gateway.chat(max_tokens=2, is_deterministic=True)
        if word == "refuse":
            assert error(response, 503)["code"] == "role_refused"
            return
        assert response.status_code == 200
        assert response.headers["x-verbatim-determinism"] == "off"
        assert response.headers["x-verbatim-degraded"] == "no-verifier"
        assert response.headers["x-verbatim-rule"] == "tenants.a.determinism.no_verifier"


async def test_a_model_that_is_not_allowed_does_not_exist(toy: ToyBackend) -> None:
    policy = fixed("version: 1\nanonymous: a\ntenants: {a: {allowed_models: [sh*]}, b: {}}")
    configs = (ModelConfig("shown", (toy.url,)), ModelConfig("secret", (toy.url,)))
    async with launch_models(configs, policies=policy) as gateway:
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["shown"]
        assert (await gateway.http.get("/v1/models/shown")).status_code == 200
        for model in ("secret", "nothing"):
            hidden = [
                await gateway.http.get(f"/v1/models/{model}"),
                await gateway.chat(model=model),
                await gateway.complete(model=model),
                await gateway.http.post("/tokenize", json={"model": model, "prompt": "x"}),
                await gateway.http.post("/detokenize", json={"model": model, "tokens": [1]}),
            ]
            said = {error(response, 404)["message"] for response in hidden}
            assert said == {f"the model {model!r} does not exist; this gateway serves 'shown'"}


# --- who asks --------------------------------------------------------------------------------------------------------


async def test_keys_lead_to_tenants_and_nothing_else_does(toy: ToyBackend) -> None:
    (key, kept), (old, also_kept) = new_key(), new_key()
    expired = entry(also_kept)[:-1] + ", expires: 2001-01-01}"
    text = f"version: 1\ntenants: {{acme: {{determinism: {{mode: verified}}, keys: [{entry(kept)}, {expired}]}}}}"
    async with launch_gateway(toy.url, policies=fixed(text)) as gateway:
        response = await gateway.chat(with_key(key), max_tokens=2)
        assert response.headers["x-verbatim-rule"] == "tenants.acme.determinism.mode"
        assert (await gateway.chat({"authorization": f"bearer  {key}"}, max_tokens=2)).status_code == 200
        other = new_key()[0]
        for wrong in (None, with_key("none"), with_key(other), with_key(old), {"authorization": key}, with_key("\xff")):
            refused = await gateway.chat({k: v.encode("latin-1") for k, v in (wrong or {}).items()})  # type: ignore[misc]
            found = error(refused, 401)
            assert (found["param"], found["code"]) == ("authorization", "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            for secret in (key, other, old):
                assert secret.split("_", 2)[2] not in refused.text
        for path in ("/v1/models", "/v1/models/toy"):
            error(await gateway.http.get(path), 401)
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            error(await gateway.http.post(path, content=b"not even json"), 401)
        assert (await gateway.http.get("/healthz")).status_code == 200


async def test_nobody_in_particular_is_welcome_where_the_policy_says_so(toy: ToyBackend) -> None:
    key, kept = new_key()
    acme = f"{{seed: {{default: 7}}, keys: [{entry(kept)}]}}"
    text = f"version: 1\nanonymous: visitors\ntenants: {{visitors: , acme: {acme}}}"
    async with launch_gateway(toy.url, policies=fixed(text)) as gateway:
        for nobody in ({}, with_key("none"), with_key("sk-whatever"), {"authorization": "Basic eDp5"}):
            response = await gateway.chat(nobody, max_tokens=2, is_deterministic=True)
            assert response.headers["x-verbatim-seed"] == "42"
        response = await gateway.chat(with_key(key), max_tokens=2, is_deterministic=True)
        assert response.headers["x-verbatim-seed"] == "7"
        # A key that does not hold is no visitor's.
        error(await gateway.chat(with_key(new_key()[0])), 401)


async def test_the_demo_shows_its_key_or_says_that_one_is_asked_for(toy: ToyBackend) -> None:
    key, kept = new_key()
    async with launch_gateway(
        toy.url, policies=fixed(f"version: 1\ntenants: {{a: {{keys: [{entry(kept)}]}}}}")
    ) as gateway:
        argv = ["demo", "--url", gateway.url, "--prompts", "1", "--loads", "1", "--tokens", "2"]
        refused = await asyncio.to_thread(CliRunner().invoke, main, argv)
        assert refused.exit_code == 1
        assert "status 401" in refused.output
        answered = await asyncio.to_thread(CliRunner().invoke, main, argv, env={"VERBATIM_API_KEY": key})
        assert answered.exit_code == 0, answered.output


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_process(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def store(redis: RedisProcess) -> AsyncIterator[RedisStore]:
    opened = RedisStore(RedisConnection(redis.url, deadline_s=10))
    yield opened
    await opened.connection.aclose()


async def test_a_client_is_told_where_it_stands_and_when_to_come_back(toy: ToyBackend) -> None:
    text = ANYBODY + "tenants: {a: {limits: {requests_per_minute: 2, tokens_per_minute: 100000, burst_s: 60}}}"
    async with launch_gateway(toy.url, policies=fixed(text)) as gateway:
        first = await gateway.chat(max_tokens=100)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert re.fullmatch(r"(29|30)(\.\d)?s", first.headers["x-ratelimit-reset-requests"])
        assert first.headers["x-ratelimit-limit-tokens"] == "100000"
        prompt = first.json()["usage"]["prompt_tokens"]
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 100_000 - prompt - 100
        streamed = await gateway.chat(max_tokens=3, stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await gateway.chat(stream=True)
        found = error(refused, 429)
        assert (found["type"], found["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert found["message"] == "the limit of 2 requests per minute is reached"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error(await gateway.http.post("/tokenize", json={"prompt": "x"}), 429)


async def test_tokens_are_held_while_a_request_runs_and_what_is_left_over_is_given_back(toy: ToyBackend) -> None:
    text = ANYBODY + "tenants: {a: {limits: {tokens_per_minute: 1000, burst_s: 60}}}"
    toy.faults = on("/v1/stream", Hang(), nth=0)
    async with launch_gateway(toy.url, policies=fixed(text)) as gateway:
        hanging = asyncio.create_task(gateway.chat(max_tokens=900))
        await toy.hung.acquire()
        assert (
            error(await gateway.chat(max_tokens=900), 429)["message"]
            == "the limit of 1000 tokens per minute is reached"
        )
        hanging.cancel()
        await toy.left.acquire()
        toy.model.script = [1, 2, 3]
        for _ in range(3):
            assert (await gateway.chat(max_tokens=800)).status_code == 200


async def test_concurrency_is_counted_over_all_gateways(toy: ToyBackend, store: RedisStore) -> None:
    text = ANYBODY + "tenants: {a: {limits: {concurrency: 2}}}"
    toy.faults = lambda path, nth: Hang() if path == "/v1/stream" and nth < 2 else None
    async with (
        launch_gateway(toy.url, policies=fixed(text), store=store) as one,
        launch_gateway(toy.url, policies=fixed(text), store=store) as other,
    ):
        hanging = [asyncio.create_task(gateway.chat(max_tokens=3)) for gateway in (one, other)]
        await toy.hung.acquire()
        await toy.hung.acquire()
        for gateway in (one, other):
            found = error(await gateway.chat(max_tokens=3), 429)
            assert found["message"] == "the limit of 2 completions at a time is reached; this request needs 1"
        found = error(await one.chat(n=3), 400)  # it would never fit
        assert found["param"] == "n"
        for task in hanging:
            task.cancel()
        await toy.left.acquire()
        await toy.left.acquire()
        while (await other.chat(max_tokens=3)).status_code == 429:
            pass


async def test_a_tenant_holds_at_most_its_share_of_a_gateway(toy: ToyBackend) -> None:
    key, kept = new_key()
    text = ANYBODY + f"tenants: {{a: {{limits: {{queue_share: 0.25}}}}, b: {{keys: [{entry(kept)}]}}}}"
    toy.faults = lambda path, nth: Hang() if path == "/v1/stream" and nth < 2 else None
    async with launch_gateway(toy.url, policies=fixed(text), max_concurrent=8) as gateway:
        hanging = asyncio.create_task(gateway.chat(n=2))
        await toy.hung.acquire()
        await toy.hung.acquire()
        refused = await gateway.chat()
        assert "2 of the 2 places for a are taken" in str(error(refused, 429)["message"])
        assert refused.headers["retry-after"] == "1"
        assert error(await gateway.chat(n=3), 400)["param"] == "n"
        assert (await gateway.chat(with_key(key), max_tokens=2)).status_code == 200
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


@pytest.mark.parametrize("word", ["allow", "deny"])
async def test_while_redis_does_not_answer_the_policys_word_holds(toy: ToyBackend, tmp_path: Path, word: str) -> None:
    text = ANYBODY + f"limits_unavailable: {word}\ntenants: {{a: {{limits: {{requests_per_minute: 1000000}}}}}}"
    with redis_process(tmp_path) as running:
        store = RedisStore(RedisConnection(running.url))
        async with launch_gateway(toy.url, policies=fixed(text), store=store) as gateway:
            running.freeze()
            response = await gateway.chat(max_tokens=2)
            if word == "allow":
                assert response.status_code == 200
                assert "x-ratelimit-limit-requests" not in response.headers
            else:
                assert error(response, 503)["code"] == "limits_unavailable"
                assert response.headers["retry-after"] == "1"
            running.thaw()
        await store.connection.aclose()


async def test_keys_reach_neither_redis_nor_logs_nor_answers(
    toy: ToyBackend, redis: RedisProcess, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    key, kept = new_key()
    limits = "{requests_per_minute: 100, tokens_per_minute: 100000, concurrency: 3}"
    text = f"version: 1\ntenants: {{acme: {{limits: {limits}, keys: [{entry(kept)}]}}}}"
    seen = []
    async with launch_gateway(toy.url, policies=fixed(text), store=store) as gateway:
        for fields in ({}, {"max_tokens": 0}, {"n": 9}, {"model": "x"}):
            response = await gateway.chat(with_key(key), **fields)
            seen.append(response.text + str(response.headers))
        response = await gateway.chat(with_key(key[:-1] + ("A" if key[-1] != "A" else "B")))
        seen.append(response.text + str(response.headers))
    async with Redis.from_url(redis.url, decode_responses=True) as client:
        names = [name async for name in client.scan_iter()]
        assert any("{acme}" in name for name in names)
        seen += names
    secret = key.split("_", 2)[2][:-1]
    for text in (*seen, caplog.text, repr(gateway)):
        assert secret not in text
        assert kept.digest.hex() not in text


# --- a policy that changes -------------------------------------------------------------------------------------------


async def test_two_hundred_reloads_under_load_half_of_them_broken(toy: ToyBackend, tmp_path: Path) -> None:
    """No request fails, and none sees half of one policy and half of another."""
    path = tmp_path / "policy.yaml"

    def text(number: int) -> str:
        # The three parts belong together: a request must see all of one policy.
        return (
            f"version: 1\nanonymous: a\ntenants: {{a: {{seed: {{default: {number}}}}}}}\n"
            f"models: {{toy: {{limits: {{max_tokens: {number % 7 + 1}}}}}}}\n"
            f"routes: {{/v1/chat/completions: {{limits: {{requests_per_minute: {10**6 + number}}}}}}}\n"
        )

    def write(number: int) -> None:
        good = text(number)
        path.write_text(good if number % 2 == 0 else good[: len(good) * (number % 5 + 3) // 10] + "\n]")

    write(0)
    policies = PolicyFile(path)
    versions = {policies.current.version: 0}
    finished = asyncio.Event()

    async def one(gateway: Gateway) -> int:
        """The number of the policy that a request got, all of it."""
        response = await gateway.chat(is_deterministic=True)
        assert response.status_code == 200, response.text
        number = versions[response.headers["x-verbatim-policy"]]
        assert response.headers["x-verbatim-seed"] == str(number)
        assert response.headers["x-ratelimit-limit-requests"] == str(10**6 + number)
        assert response.json()["usage"]["completion_tokens"] == number % 7 + 1
        return number

    async def load(gateway: Gateway) -> None:
        while not finished.is_set():
            await one(gateway)

    toy.model.script = list(range(1, 100))
    async with launch_gateway(toy.url, policies=policies) as gateway:
        clients = [asyncio.create_task(load(gateway)) for _ in range(2)]
        for number in range(1, 201):
            write(number)
            if number % 2 == 0:
                versions[load_policy(text(number), "p").version] = number
            await policies.reload()
            if number % 10 < 2:
                assert await one(gateway) == number - number % 2
        finished.set()
        await asyncio.gather(*clients)
    assert (policies.reloads, policies.failures) == (100, 100)
