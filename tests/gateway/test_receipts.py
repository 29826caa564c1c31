"""Receipts of a running gateway: what they say, who gets them, and what becomes of them in trouble."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from answers import error, events
from launched import Gateway, launch_gateway, launch_models
from redis.asyncio import Redis
from redis_process import RedisProcess
from toy_backend import Drop, ToyBackend, Wait
from toy_model import EOS, FILES, ToyModel, ids
from toy_tools import CALL, TEMPLATE, TIME, WEATHER

from gateway.models_file import ModelConfig, UpstreamConfig
from gateway.receipts.chain import prompt_digest
from gateway.receipts.key_files import KeyFileError, KeyFolder, public_pem, read_keys, write_new_key
from gateway.receipts.keys import PublicKeys, read_jwks
from gateway.receipts.receipt import Receipt, parse
from gateway.receipts.sealing import ReceiptSealer, Sealed
from gateway.receipts.stores import ENTRY_BYTES, MemoryReceipts, RedisReceipts, name_of
from gateway.redis_connection import RedisConnection
from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy
from policies.policy_file import PolicyFile, Unfit

ID = "x-verbatim-receipt"
KEPT = "x-verbatim-receipt-kept"


def policy(receipts: str = "{mode: always}", rest: str = "") -> FixedPolicy:
    tenants = "{a: {determinism: {mode: verified}}}"
    text = f"version: 1\nanonymous: a\ntenants: {tenants}\ndefaults: {{receipts: {receipts}{rest}}}\n"
    return FixedPolicy(load_policy(text, "policy.yaml"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("receipts")
    write_new_key(folder, datetime(2030, 1, 1, tzinfo=UTC))
    return folder


def receipting(url: str, keys: Path, policies: FixedPolicy | None = None, **more: Any) -> Any:
    return launch_gateway(url, policies=policies or policy(), receipt_keys=str(keys), **more)


async def receipt_of(gateway: Gateway, response: httpx.Response) -> Receipt:
    """Fetched, and checked with the keys that the gateway publishes."""
    assert response.status_code == 200, response.text
    fetched = await gateway.http.get(f"/v1/receipts/{response.headers[ID]}")
    assert fetched.status_code == 200, fetched.text
    assert fetched.headers["content-type"] == "application/json"
    return (await published(gateway)).check(fetched.content)


async def published(gateway: Gateway) -> PublicKeys:
    return read_jwks((await gateway.http.get("/.well-known/verbatim-receipts.json")).content)


# --- what a receipt says ---------------------------------------------------------------------------------------------


async def test_a_receipt_says_what_was_answered(toy: ToyBackend, keys: Path) -> None:
    async with receipting(toy.url, keys) as gateway:
        body = {"model": "toy", "prompt": "hi", "max_tokens": 5, "n": 2, "logprobs": 0, "temperature": 0.7, "stop": "Z"}
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = await gateway.http.post("/v1/completions", content=content, headers=headers)
        assert response.headers[KEPT] == "kept"
        statement = (await receipt_of(gateway, response)).statement
        answered, answer = response.json(), statement.answer
        assert (answer.fingerprint, answer.model) == (answered["system_fingerprint"], "toy")
        assert [prompt.tokens for prompt in answer.prompts] == [tuple(ids("hi"))]
        assert (answer.stop_ids, answer.stops, answer.sampling.temperature) == ((EOS,), ("Z",), "0.7")
        for said, choice in zip(answer.choices, answered["choices"], strict=True):
            logprobs = choice["logprobs"]["token_logprobs"]
            assert bytes.fromhex(said.logprobs) == b"".join(map(bits, logprobs))
            assert len(said.tokens) == len(logprobs)
            assert (said.finish, said.max_tokens, said.prompt) == (choice["finish_reason"], 5, 0)
        assert answer.choices[0].seed == response.headers["x-verbatim-seed"] == "42"
        assert statement.request.digest == hashlib.sha256(content).hexdigest()
        assert statement.request.response == answered["id"]
        assert (statement.request.tenant, statement.request.route) == ("a", "/v1/completions")
        assert statement.request.policy == response.headers["x-verbatim-policy"]
        assert statement.request.rule == response.headers["x-verbatim-rule"]
        assert statement.issued.id == response.headers[ID]
        assert statement.issued.windows == int(response.headers["x-verbatim-windows"])
        assert statement.issued.cache == response.headers["x-verbatim-cache"] == "off"


def bits(logprob: float) -> bytes:
    return struct.pack(">f", logprob)


async def test_a_list_of_prompts_is_one_receipt(toy: ToyBackend, keys: Path) -> None:
    async with receipting(toy.url, keys) as gateway:
        response = await gateway.complete(prompt=["hi", "Paris"], n=2, max_tokens=3)
        answer = (await receipt_of(gateway, response)).statement.answer
        assert [choice.prompt for choice in answer.choices] == [0, 0, 1, 1]
        assert [prompt.tokens for prompt in answer.prompts] == [tuple(ids("hi")), tuple(ids("Paris"))]


async def test_a_policy_keeps_prompts_out_of_receipts(toy: ToyBackend, keys: Path) -> None:
    async with receipting(toy.url, keys, policy("{mode: always, prompt: digest}")) as gateway:
        answer = (await receipt_of(gateway, await gateway.complete())).statement.answer
        (prompt,) = answer.prompts
        assert (prompt.tokens, prompt.digest) == (None, prompt_digest(ids("hi")).hex())


async def test_of_a_stop_string_the_receipt_holds_what_the_answer_does(toy: ToyBackend, keys: Path) -> None:
    """Not what was committed behind it."""
    toy.model = ToyModel(ids("abcStopdefgh") * 3)
    async with receipting(toy.url, keys) as gateway:
        for stream in (False, True):
            response = await gateway.complete(stop="Stop", max_tokens=30, stream=stream)
            answer = (await receipt_of(gateway, response)).statement.answer
            assert answer.choices[0].tokens == tuple(ids("abcStop"))
            assert answer.choices[0].finish == "stop"


# --- wherever an answer comes from -----------------------------------------------------------------------------------


async def test_hit_miss_and_follower_have_the_same_receipt(toy: ToyBackend, keys: Path) -> None:
    """But for the name, the time and what it took; streamed or not, as the body's digest is another's then."""
    caching = policy(rest=", cache: {scope: tenant}")
    async with receipting(toy.url, keys, caching) as gateway:
        for fields in ({"n": 1}, {"n": 3, "stop": "e"}, {"n": 2, "logprobs": True, "top_logprobs": 2}):
            both = [{**fields, "seed": 7, "max_tokens": 40, "stream": stream} for stream in (False, True)]
            statements = []
            for asked in both:
                bodies = [gateway.chat(**asked) for _ in range(3)]
                responses = [await bodies[0], *await asyncio.gather(*bodies[1:])]
                receipts = [await receipt_of(gateway, response) for response in responses]
                first = receipts[0].statement
                assert {receipt.statement.issued.id for receipt in receipts} == {r.headers[ID] for r in responses}
                for receipt in receipts:
                    assert replace(receipt.statement, issued=first.issued) == first
                statements += [receipt.statement for receipt in receipts]
            assert len({statement.answer for statement in statements}) == 1
            assert {statement.issued.cache for statement in statements} >= {"lead", "hit"}


async def test_a_follower_has_the_leaders_receipt(toy: ToyBackend, keys: Path) -> None:
    async with receipting(toy.url, keys, policy(rest=", cache: {scope: tenant}")) as gateway:
        responses = await asyncio.gather(*(gateway.chat(max_tokens=60, seed=3) for _ in range(4)))
        statements = [(await receipt_of(gateway, response)).statement for response in responses]
        assert {statement.issued.cache for statement in statements} == {"lead", "follow"}
        assert len({(statement.answer, statement.request) for statement in statements}) == 1


async def test_an_answer_that_broke_off_has_no_receipt(toy: ToyBackend, keys: Path) -> None:
    toy.wants_draft = False
    toy.faults = lambda path, nth: Drop() if path == "/v1/verify" and nth >= 3 else None
    async with receipting(toy.url, keys) as gateway:
        broken = await gateway.chat(stream=True, max_tokens=60)
        assert "error" in events(broken)[-1]
        error(await gateway.http.get(f"/v1/receipts/{broken.headers[ID]}"), 404)
        assert gateway.notary.counts == {"kept": 0, "local": 0, "lost": 0}


async def test_an_answer_whose_client_left_has_no_receipt(toy: ToyBackend, keys: Path) -> None:
    gate = asyncio.Event()
    toy.wants_draft = False
    toy.faults = lambda path, nth: Wait(gate) if path == "/v1/verify" and nth == 2 else None
    async with receipting(toy.url, keys) as gateway:
        body = {"model": "toy", "prompt": "hi", "stream": True, "max_tokens": 30}
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            id_ = response.headers[ID]
            await anext(response.aiter_bytes())
            await toy.hung.acquire()
        await gateway.models.admission.wait_idle()
        gate.set()
        error(await gateway.http.get(f"/v1/receipts/{id_}"), 404)
        assert gateway.notary.counts == {"kept": 0, "local": 0, "lost": 0}


async def test_tools_and_grammars_are_in_it_hit_or_miss(keys: Path) -> None:
    """Whatever shows the tokens, the receipt holds the tokens; and the grammar that they were kept to."""
    files = msgspec.structs.replace(FILES, chat_template=TEMPLATE)
    asks: list[dict[str, Any]] = [
        {"tools": [WEATHER, TIME], "max_tokens": 90},
        {"regex": "[a-z]+", "max_tokens": 5},
        {"response_format": {"type": "json_object"}, "max_tokens": 5, "stream": True},
    ]
    async with (
        ToyBackend(model=ToyModel([*ids(CALL), EOS]), files=files) as toy,
        receipting(toy.url, keys, policy(rest=", cache: {scope: tenant}")) as gateway,
    ):
        for fields in asks:
            miss, hit = [await gateway.chat(**fields) for _ in range(2)]
            one, other = [(await receipt_of(gateway, response)).statement for response in (miss, hit)]
            assert (one.issued.cache, other.issued.cache) == ("lead", "hit")
            assert replace(other, issued=one.issued) == one
            tokens = one.answer.choices[0].tokens
            assert tokens == tuple([*ids(CALL), EOS][: len(tokens)])
            assert (one.answer.sampling.grammar is not None) == ("tools" not in fields)


# --- whose they are --------------------------------------------------------------------------------------------------


async def test_a_receipt_is_its_own_tenants_alone(toy: ToyBackend, keys: Path) -> None:
    made = [new_key() for _ in range(2)]
    tenants = "".join(
        f"  {name}:\n    keys: [{{id: {json.dumps(kept.id)}, hash: {json.dumps(kept.hash)}}}]\n"
        for name, (_, kept) in zip("ab", made, strict=True)
    )
    text = f"version: 1\ndefaults: {{determinism: {{mode: verified}}, receipts: {{mode: always}}}}\ntenants:\n{tenants}"
    one, other = ({"authorization": f"Bearer {key}"} for key, _ in made)
    async with receipting(toy.url, keys, FixedPolicy(load_policy(text, "p.yaml"))) as gateway:
        response = await gateway.chat(headers=one, max_tokens=2)
        path = f"/v1/receipts/{response.headers[ID]}"
        assert (await gateway.http.get(path, headers=one)).status_code == 200
        said = error(await gateway.http.get(path, headers=other), 404)
        assert said["code"] == "receipt_not_found"
        unknown = error(await gateway.http.get("/v1/receipts/vr_" + "0" * 32, headers=other), 404)
        assert unknown == said, "one cannot tell that there is one"
        error(await gateway.http.get(path), 401)
        assert (await gateway.http.get("/.well-known/verbatim-receipts.json")).status_code == 200


@pytest.mark.parametrize("id_", ["x", "vr_" + "0" * 31, "vr_" + "g" * 32, "vr_*", "%2e%2e"])
async def test_what_is_no_name_finds_nothing(toy: ToyBackend, keys: Path, id_: str) -> None:
    async with receipting(toy.url, keys) as gateway:
        assert (await gateway.http.get(f"/v1/receipts/{id_}")).status_code == 404


async def test_requests_that_may_not_have_one_are_refused_by_name(toy: ToyBackend, keys: Path) -> None:
    async with receipting(toy.url, keys, policy("{mode: never}")) as gateway:
        said = error(await gateway.chat(headers={ID: "true"}), 403)
        assert (said["param"], said["code"]) == ("X-Verbatim-Receipt", "not_allowed")
        assert ID not in (await gateway.chat(max_tokens=1)).headers
    async with receipting(toy.url, keys, policy("{mode: on_request}")) as gateway:
        assert ID not in (await gateway.chat(max_tokens=1)).headers
        await receipt_of(gateway, await gateway.chat(headers={ID: "true"}, max_tokens=1))
        error(await gateway.chat(headers={ID: "true"}, is_deterministic=False), 400)
        error(await gateway.chat(headers={ID: "maybe"}), 400)


# --- where they are kept ---------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_memory_keeps_them_for_their_time_and_to_its_bound() -> None:
    clock = Clock()
    memory = MemoryReceipts(3 * (ENTRY_BYTES + 10), clock)
    for name in "abc":
        assert memory.put(name, b"x" * 10, 5.0)
    assert not memory.put("long", b"x" * 3 * ENTRY_BYTES * 10, 5.0)
    assert memory.put("d", b"y" * 10, 50.0)
    assert [memory.get(name) is not None for name in "abcd"] == [False, True, True, True]
    assert memory.evicted == 1
    clock.now = 5.0
    assert memory.get("b") is None
    assert memory.get("d") == b"y" * 10
    assert memory.put("e", b"x" * 20, 5.0)
    assert memory.get("d") is not None
    assert memory.evicted == 1, "what goes behind its time is not missed"
    assert memory.bytes <= 3 * (ENTRY_BYTES + 10)


async def test_one_too_long_to_keep_is_said_to_be_lost(toy: ToyBackend, keys: Path) -> None:
    async with receipting(toy.url, keys, receipt_bytes=1000) as gateway:
        response = await gateway.chat(max_tokens=50)
        assert response.headers[KEPT] == "lost"
        error(await gateway.http.get(f"/v1/receipts/{response.headers[ID]}"), 404)
        streamed = await gateway.chat(max_tokens=50, stream=True)
        assert ": verbatim windows=" in streamed.text and " receipt=lost\n" in streamed.text
        assert gateway.notary.counts["lost"] == 2


@asynccontextmanager
async def shared(server: RedisProcess, *operators: bytes) -> AsyncIterator[RedisReceipts]:
    connection = RedisConnection(server.url)
    try:
        yield RedisReceipts(connection, Clock(), ReceiptSealer(operators))
    finally:
        await connection.aclose()


async def test_gateways_share_receipts_in_redis(toy: ToyBackend, keys: Path, server: RedisProcess) -> None:
    async with shared(server) as one, shared(server) as other, Redis.from_url(server.url) as redis:
        always = policy("{mode: always, ttl_s: 1000}")
        async with (
            receipting(toy.url, keys, always, receipts=one) as gateway,
            receipting(toy.url, keys, always, receipts=other) as second,
        ):
            response = await gateway.chat(max_tokens=3)
            assert response.headers[KEPT] == "kept"
            assert (await receipt_of(second, response)).statement.issued.id == response.headers[ID]
            (name,) = [name async for name in redis.scan_iter("verbatim:receipt:*")]
            assert 900_000 < await redis.pttl(name) <= 1_000_000
            assert gateway.notary.memory.bytes == 0


async def test_receipts_in_redis_are_encrypted_with_the_operators_keys(
    toy: ToyBackend, keys: Path, server: RedisProcess
) -> None:
    old, new, other = b"o" * 32, b"n" * 32, b"x" * 32
    async with (
        Redis.from_url(server.url) as redis,
        shared(server) as plain,
        shared(server, old) as first,
        shared(server, new, old) as changed,
        shared(server, other) as foreign,
    ):
        name, raw = name_of("a", "vr_" + "1" * 32), b'{"tokens":[1,2,3]}'
        await first.put(name, raw, 60.0)
        kept = await redis.get(f"verbatim:receipt:{name}")
        assert b"tokens" not in kept
        assert await first.get(name) == await changed.get(name) == raw
        for store in (plain, foreign):
            with pytest.raises(Sealed, match="not set"):
                await store.get(name)
        # Moved under another name, or damaged anywhere behind the key's id.
        moved = name_of("b", "vr_" + "1" * 32)
        for place, content in ((moved, kept), (name, kept[:-1] + bytes([kept[-1] ^ 1])), (name, kept[:9])):
            await redis.set(f"verbatim:receipt:{place}", content)
            with pytest.raises(Sealed, match="damaged"):
                await first.get(place)
        await plain.put(name, raw, 60.0)
        assert await changed.get(name) == raw, "from before there were keys"
        async with receipting(toy.url, keys, receipts=first) as gateway:
            response = await gateway.chat(max_tokens=3)
            await receipt_of(gateway, response)
            place = f"verbatim:receipt:{name_of('a', response.headers[ID])}"
            await redis.set(place, (await redis.get(place))[:-1])
            said = error(await gateway.http.get(f"/v1/receipts/{response.headers[ID]}"), 503)
            assert "cannot be read: it is damaged" in said["message"]


async def test_a_redis_in_trouble_loses_no_receipt_in_silence(
    toy: ToyBackend, keys: Path, server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with shared(server) as store, receipting(toy.url, keys, receipts=store) as gateway:
        before = await gateway.chat(max_tokens=3)
        server.freeze()
        try:
            with caplog.at_level(logging.ERROR):
                response = await gateway.chat(max_tokens=3)
                streamed = await gateway.chat(max_tokens=3, stream=True)
            assert response.headers[KEPT] == "local"
            assert " receipt=local\n" in streamed.text
            assert f"receipt {response.headers[ID]} is in this gateway's memory alone" in caplog.text
            assert gateway.notary.counts == {"kept": 1, "local": 2, "lost": 0}
            await receipt_of(gateway, response)
            said = error(await gateway.http.get(f"/v1/receipts/{before.headers[ID]}"), 503)
            assert said["code"] == "receipts_unavailable"
        finally:
            server.thaw()


async def test_a_redis_that_takes_nothing_loses_no_receipt_either(
    toy: ToyBackend, keys: Path, server: RedisProcess
) -> None:
    async with (
        Redis.from_url(server.url) as redis,
        shared(server) as store,
        receipting(toy.url, keys, receipts=store) as gateway,
    ):
        await redis.config_set("maxmemory", 1)
        try:
            response = await gateway.chat(max_tokens=3)
        finally:
            await redis.config_set("maxmemory", 0)
        assert response.headers[KEPT] == "local"
        await receipt_of(gateway, response)
        # What somebody else put there is no receipt.
        other = "vr_" + "0" * 32
        await redis.rpush(f"verbatim:receipt:{name_of('a', other)}", "x")
        error(await gateway.http.get(f"/v1/receipts/{other}"), 503)


async def test_a_request_handed_on_to_an_upstream_has_no_receipt_and_is_told_so(toy: ToyBackend, keys: Path) -> None:
    """Before anything goes to the upstream, at which nobody listens."""
    upstream = UpstreamConfig("http://127.0.0.1:1/v1", "toy", None)
    configs = (ModelConfig("toy", (toy.url,), upstreams=(upstream,)),)
    text = "version: 1\nanonymous: a\ntenants: {a: {receipts: {mode: on_request}}}\n"
    policies = FixedPolicy(load_policy(text, "p.yaml"))
    async with launch_models(configs, policies=policies, receipt_keys=str(keys)) as gateway:
        said = error(await gateway.chat(headers={ID: "true"}), 400)
        assert said["param"] == "X-Verbatim-Receipt" and "mode off verifies nothing" in said["message"]
        verified = {ID: "true", "x-verbatim-determinism": "verified"}
        await receipt_of(gateway, await gateway.chat(headers=verified, max_tokens=2))


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_new_key_signs_and_the_old_ones_are_published(tmp_path: Path) -> None:
    first_path, first = write_new_key(tmp_path, datetime(2030, 1, 1, tzinfo=UTC))
    assert first_path.stat().st_mode & 0o777 == 0o600
    folder = KeyFolder(tmp_path)
    assert folder.current.signing is not None and folder.current.signing.public == first.public
    _, second = write_new_key(tmp_path, datetime(2030, 2, 1, tzinfo=UTC))
    folder.reload()
    assert folder.current.signing.public == second.public
    assert set(folder.current.public.kids) == {first.public.kid, second.public.kid}
    # Retired: the private part is gone, the public one is still published.
    first_path.write_bytes(public_pem(first.public))
    folder.reload()
    assert folder.current.signing.public == second.public
    assert set(folder.current.public.kids) == {first.public.kid, second.public.kid}


def test_keys_that_are_none_are_named_and_those_before_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyFileError, match="holds no key"):
        read_keys(tmp_path)
    path, _ = write_new_key(tmp_path, datetime(2030, 1, 1, tzinfo=UTC))
    folder = KeyFolder(tmp_path)
    before = folder.current
    wrong = tmp_path / "wrong.pem"
    for content in (b"", b"secret", b"-----BEGIN PUBLIC KEY-----\nsecret\n"):
        wrong.write_bytes(content)
        with pytest.raises(KeyFileError, match=r"wrong\.pem: is no key") as caught:
            read_keys(tmp_path)
        assert "secret" not in str(caught.value)
        folder.reload()
        assert folder.current is before
    wrong.unlink()
    path.unlink()
    (tmp_path / "public.pem").write_bytes(public_pem(before.signing.public))  # type: ignore[union-attr]
    folder.reload()
    assert folder.current is before and folder.failures == 4
    assert "no private key any more" in caplog.text


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = write_new_key(tmp_path, datetime(2030, 1, 1, tzinfo=UTC))
    read_keys(path)
    assert not caplog.text
    path.chmod(0o644)
    read_keys(path)
    assert f"{path} can be read by others" in caplog.text


async def test_a_policy_that_demands_receipts_needs_a_key(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    quiet = "version: 1\nanonymous: a\ntenants: {a: {}}\n"
    file.write_text(quiet + "defaults: {receipts: {mode: on_request}}\n")
    with pytest.raises(Unfit, match=r"defaults\.receipts\.mode asks for receipts, and there is no key"):
        PolicyFile(file, KeyFolder(None).check)
    file.write_text(quiet)
    policies = PolicyFile(file, KeyFolder(None).check)
    before = policies.current
    file.write_text(quiet + "models: {m: {receipts: {mode: always}}}\n")
    await policies.reload()
    assert (policies.current, policies.failures) == (before, 1)


async def test_a_running_gateway_takes_a_new_key_on_sighup(toy: ToyBackend, tmp_path: Path) -> None:
    path, folder = tmp_path / "policy.yaml", tmp_path / "keys"
    path.write_text("version: 1\nanonymous: a\ntenants: {a: {receipts: {mode: always}}}\n")
    write_new_key(folder, datetime(2030, 1, 1, tzinfo=UTC))
    argv = [sys.executable, "-m", "gateway.cli", "gateway", "--backend", toy.url, "--policy", str(path), "--port", "0"]
    argv += ["--receipt-keys", str(folder)]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    gateway = await asyncio.create_subprocess_exec(*argv, cwd=root, env=env, stdout=asyncio.subprocess.PIPE)
    try:
        assert gateway.stdout is not None
        url = (await gateway.stdout.readline()).decode().rpartition("Serving on ")[2].strip().removesuffix("/v1")
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            _, second = write_new_key(folder, datetime(2030, 2, 1, tzinfo=UTC))
            gateway.send_signal(signal.SIGHUP)
            while len((await client.get("/.well-known/verbatim-receipts.json")).json()["keys"]) < 2:
                pass
            body = {"model": "toy", "prompt": "hi", "max_tokens": 2, "is_deterministic": True}
            answer = await client.post("/v1/completions", json=body)
            receipt = parse((await client.get(f"/v1/receipts/{answer.headers[ID]}")).content)
            assert receipt.signature.kid == second.public.kid
    finally:
        gateway.terminate()
    assert await gateway.wait() == 0
