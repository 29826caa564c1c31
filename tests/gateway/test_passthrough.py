"""Requests without a guarantee go to their model's upstream and back as they are, byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launched import Gateway, launch_models
from mock_upstream import MockUpstream, chunked, plain
from toy_backend import ToyBackend
from toy_model import TOKENIZER, ToyModel, ids

from gateway.backends.upstream import end_to_end
from gateway.models_file import Drafts, ModelConfig, UpstreamConfig
from policies.document import FixedPolicy
from policies.loader import load_policy

BODY = (
    b'{ "messages": [{"role":"user","content":"\\u00e9"}],\n "model": "m", "vendor_field": {"x": 1.50, "y": [null]} }'
)
EVENTS = (
    b'data: {"choices":[{"delta":{"content":"\xc3\xa9"},"vendor":1.50}]}\n\n'
    b": a comment\r\n\r\nevent: odd\ndata: two\ndata: lines\n\ndata: [DONE]\n\n"
)
SSE = "content-type: text/event-stream; charset=utf-8"
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def launch(
    *upstreams: MockUpstream, model: str = "m", key: str | None = "k", **overrides: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose one model has only these upstreams."""
    async with AsyncExitStack() as stack:
        for upstream in upstreams:
            await stack.enter_async_context(upstream)
        configs = tuple(UpstreamConfig(upstream.url, model, key) for upstream in upstreams)
        yield await stack.enter_async_context(launch_models((ModelConfig("m", upstreams=configs),), **overrides))


async def post(
    gateway: Gateway, content: bytes = BODY, path: str = "/v1/chat/completions", **headers: str
) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gateway.http.post(path, content=content, headers=JSON | names)


async def test_body_status_and_unknown_fields_are_kept_both_ways() -> None:
    answer = b'{ "id": "x", "vendor": {"z": 1.50},\n "a": 1 }'
    headers = ("content-type: application/json", "x-vendor: 1", "set-cookie: a=1", "set-cookie: b=2")
    headers += ("X-Verbatim-Determinism: verified", "X-Verbatim-Receipt: vr_1")
    async with launch(MockUpstream(plain(answer, "200 OK", *headers))) as gateway:
        response = await post(gateway, path="/v1/chat/completions?beta=1&x=%20")
        assert response.content == answer
        assert response.headers["x-vendor"] == "1"
        assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert response.headers.get_list("x-verbatim-determinism") == ["off"]
        assert "x-verbatim-receipt" not in response.headers, "it is another gateway's"
        assert response.headers["content-length"] == str(len(answer))


async def test_what_the_upstream_sees() -> None:
    upstream = MockUpstream()
    async with launch(upstream) as gateway:
        await post(
            gateway,
            authorization="Bearer the client's",
            x_verbatim_determinism="off",
            x_vendor="1",
            connection="keep-alive, X-Hop",
            x_hop="1",
            te="trailers",
            accept_encoding="br",
            path="/v1/embeddings?a=b%20c",
        )
        (seen,) = upstream.received
        assert seen.line == "POST /base/embeddings?a=b%20c HTTP/1.1"
        assert seen.body == BODY, "byte for byte"
        names = dict(seen.headers)
        assert names["authorization"] == "Bearer k"
        assert (names["x-vendor"], names["accept-encoding"]) == ("1", "br")
        assert names["host"] == upstream.url.split("/")[2]
        assert not {"te", "x-hop", "x-verbatim-determinism", "connection"} & set(names)
        assert [name for name, _ in seen.headers].count("authorization") == 1
    async with launch(MockUpstream(), key=None) as gateway:
        await post(gateway, authorization="Bearer the client's")
    no_key = MockUpstream()
    async with launch(no_key, key=None) as gateway:
        await post(gateway, authorization="Bearer the client's")
        assert "authorization" not in dict(no_key.received[0].headers), "it is for this gateway alone"


async def test_only_what_the_upstream_calls_otherwise_is_changed() -> None:
    upstream = MockUpstream()
    async with launch(upstream, model="their/name") as gateway:
        await post(gateway, b'{"z": 1.50, "model": "m", "is_deterministic": false, "x": "\\u00e9"}')
        assert upstream.received[0].body == b'{"z":1.50,"model":"their/name","x":"\\u00e9"}'


@pytest.mark.parametrize(
    ("status", "header"),
    [
        ("400 Bad Request", "x-a: 1"),
        ("401 Unauthorized", "www-authenticate: Bearer"),
        ("422 Unprocessable Entity", "x-a: 1"),
        ("429 Too Many Requests", "retry-after: 17"),
        ("500 Internal Server Error", "x-a: 1"),
        ("503 Service Unavailable", "retry-after: Wed, 21 Oct 2026 07:28:00 GMT"),
        ("302 Found", "location: http://elsewhere/"),
    ],
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_refusals_pass_through(status: str, header: str, stream: bytes) -> None:
    body = b'{"error": {"message": "no", "vendor": 1}}'
    upstream, other = MockUpstream(plain(body, status, header, "content-type: application/json")), MockUpstream()
    async with launch(upstream, other) as gateway:
        response = await post(gateway, b'{"model":"m","stream":' + stream + b"}")
        assert (f"{response.status_code} {response.reason_phrase}", response.content) == (status, body)
        name, _, value = header.partition(": ")
        assert response.headers[name] == value
        assert response.headers["content-type"] == "application/json"
        assert not other.received, "an answer is an answer"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_events_are_not_touched_wherever_they_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(EVENTS)]
    pieces = [EVENTS[left:right] for left, right in itertools.pairwise(edges)]

    async def run() -> None:
        async with launch(MockUpstream(chunked(pieces, SSE))) as gateway:
            response = await post(gateway)
            assert response.content == EVENTS
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"

    asyncio.run(run())


async def test_events_are_not_held_back() -> None:
    """The first event arrives while the upstream has not sent the second one."""
    upstream = MockUpstream([*chunked([b"data: 1\n\n"], SSE, end=False)])
    gate = asyncio.Event()

    class Slow(MockUpstream):
        async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            await super()._exchange(reader, writer)
            await gate.wait()
            writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
            await writer.drain()
            return True

    slow = Slow(upstream.answer)
    async with launch(slow) as gateway:
        request = gateway.http.stream("POST", "/v1/chat/completions", content=BODY, headers=JSON)
        async with request as response:
            parts = response.aiter_raw()
            assert await anext(parts) == b"data: 1\n\n"
            gate.set()
            assert b"".join([part async for part in parts]) == b"data: 2\n\n"


async def test_compressed_answers_stay_compressed() -> None:
    answer = plain(b"\x1f\x8bnot really", "200 OK", "content-encoding: gzip", "content-type: application/json")
    async with launch(MockUpstream(answer)) as gateway:
        request = gateway.http.stream("POST", "/v1/chat/completions", content=BODY, headers=JSON)
        async with request as response:
            assert b"".join([part async for part in response.aiter_raw()]) == b"\x1f\x8bnot really"


async def test_a_stream_that_breaks_off_says_so() -> None:
    async with launch(MockUpstream(chunked([EVENTS[:30]], SSE, end=False))) as gateway:
        response = await post(gateway)
        assert response.content.startswith(EVENTS[:30] + b"\n\ndata: ")
        assert json.loads(response.content.rsplit(b"data: ", 1)[1])["error"]["code"] == "backend_failed"
        assert b"[DONE]" not in response.content


@pytest.mark.parametrize(
    "answer",
    [
        chunked([b'{"half":'], "content-type: application/json", end=False),
        chunked([b"half"], SSE, "content-encoding: br", end=False),
        [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\nhalf"],
    ],
    ids=["JSON", "compressed", "of a length"],
)
async def test_another_answer_that_breaks_off_does_not_look_complete(answer: list[bytes]) -> None:
    """Nor is anything added to it."""
    async with (
        launch(MockUpstream(answer)) as gateway,
        gateway.http.stream("POST", "/v1/chat/completions", content=BODY, headers=JSON) as response,
    ):
        came = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async for part in response.aiter_raw():
                came += part
        assert b"half" in came and b"error" not in came


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_followed_by_us(stream: bool) -> None:
    upstream = MockUpstream(None)
    async with launch(upstream) as gateway:
        asking = asyncio.create_task(post(gateway, json.dumps({"model": "m", "stream": stream}).encode()))
        await upstream.hung.acquire()
        asking.cancel()
        await upstream.left.acquire()
        await gateway.models.admission.wait_idle()


async def test_a_request_that_reached_nobody_goes_elsewhere() -> None:
    async with MockUpstream() as gone, MockUpstream() as there:
        gone_url = gone.url
        await gone.__aexit__()
        configs = (UpstreamConfig(gone_url, "m", None), UpstreamConfig(there.url, "m", None))
        async with launch_models((ModelConfig("m", upstreams=configs),)) as gateway:
            for _ in range(5):
                assert (await post(gateway)).status_code == 200
        async with launch_models((ModelConfig("m", upstreams=configs[:1]),)) as gateway:
            response = await post(gateway)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "backend_unavailable")


@pytest.mark.parametrize("limits", [{"first_byte_timeout_s": 0.05}, {"call_timeout_s": 0.05}])
async def test_silence_has_an_end(limits: dict[str, float]) -> None:
    upstream = MockUpstream(None)
    async with launch(upstream, **limits) as gateway:
        response = await post(gateway)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "backend_timeout")
        await upstream.left.acquire()


async def test_admission_holds_here_too() -> None:
    upstream = MockUpstream(None)
    async with launch(upstream, max_concurrent=8) as gateway:
        asking = [asyncio.create_task(post(gateway)) for _ in range(8)]
        for _ in asking:
            await upstream.hung.acquire()
        assert (await post(gateway)).status_code == 429
        gateway.models.admission.expire()
        for task in asking:
            assert (await task).json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("limit", ["queue_share: 0.01", "concurrency: 2"])
async def test_what_would_never_fit_is_not_told_to_come_back(limit: str) -> None:
    upstream = MockUpstream()
    policy = f"version: 1\ndefaults: {{limits: {{{limit}}}}}\ntenants: {{all: {{}}}}\nanonymous: all"
    async with launch(upstream, policies=FixedPolicy(load_policy(policy, "policy.yaml"))) as gateway:
        assert (await post(gateway, b'{"model":"m","n":2}')).status_code == 200
        refused = await post(gateway, b'{"model":"m","n":3}')
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


async def test_what_is_not_handed_on() -> None:
    upstream = MockUpstream()
    async with launch(upstream, max_body_bytes=1000) as gateway:
        verified = await post(
            gateway, b'{"model":"m","is_deterministic":true,"messages":[{"role":"user","content":"x"}]}'
        )
        assert (verified.status_code, verified.json()["error"]["code"]) == (503, "role_refused")
        twofold = await post(gateway, b'{"model":"m","is_deterministic":true}', x_verbatim_determinism="off")
        assert (twofold.status_code, twofold.json()["error"]["param"]) == (400, "is_deterministic")
        assert (await post(gateway, b'{"model":"other","messages":[]}')).status_code in (400, 404)
        assert (await post(gateway, b"{nonsense")).status_code == 400
        assert (await post(gateway, b'{"model":7}')).status_code == 400
        assert (await post(gateway, b'{"model":"m","x":"' + b"x" * 1000 + b'"}')).status_code == 413
        assert (await gateway.http.get("/v1/files")).status_code == 404
        assert [card["id"] for card in (await gateway.http.get("/v1/models")).json()["data"]] == ["m"]
        assert not upstream.received


async def test_a_model_with_both_verifies_here_and_hands_on_the_rest() -> None:
    async with ToyBackend() as toy, MockUpstream(plain(b'{"from":"upstream"}')) as upstream:
        config = ModelConfig("toy", (toy.url,), upstreams=(UpstreamConfig(upstream.url, "toy", None),))
        async with launch_models((config,)) as gateway:
            verified = await gateway.chat(is_deterministic=True, max_tokens=4)
            assert (verified.status_code, verified.headers["x-verbatim-determinism"]) == (200, "verified")
            assert not upstream.received
            assert (await gateway.chat(max_tokens=4)).json() == {"from": "upstream"}
            assert toy.calls["/v1/stream"] == 0
            tokens = await gateway.http.post("/v1/tokenize", json={"model": "toy", "prompt": "hi"})
            assert tokens.json()["count"] == 2


@pytest.mark.parametrize("roles", [("verify",), ("draft", "verify", "decode")])
async def test_an_upstream_drafts_for_verifiers(roles: tuple[str, ...]) -> None:
    """Its drafts are used where they are right, and change nothing where it is wrong or gone."""
    said = ids("The quick brown fox jumps over the lazy dog, again and again and again.")
    model = ToyModel(said)
    drafted = said

    class Drafting(MockUpstream):
        async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            self.answer = [b""]  # It is not known before the request is.
            await super()._exchange(reader, writer)
            body = json.loads(self.received[-1].body)
            done, count = len(body["prompt"]) - prompt_tokens, body["max_tokens"]
            finish = "stop" if done + count > len(drafted) else "length"
            choice = {"text": TOKENIZER.decode(drafted[done : done + count]), "finish_reason": finish}
            writer.write(plain(json.dumps({"choices": [choice]}).encode())[0])
            await writer.drain()
            return True

    async with ToyBackend(model, roles=roles) as toy, Drafting() as upstream:
        upstreams = (UpstreamConfig(upstream.url, "theirs", "k"),)
        async with launch_models((ModelConfig("m", (toy.url,)),)) as gateway:
            expected = (await gateway.chat(model="m", is_deterministic=True, temperature=0)).json()
            prompt_tokens = expected["usage"]["prompt_tokens"]
        before = toy.calls.copy()
        config = ModelConfig("m", (toy.url,), upstreams=upstreams, drafts=Drafts.UPSTREAMS)
        async with launch_models((config,)) as gateway:

            async def ask() -> httpx.Response:
                response = await gateway.chat(model="m", is_deterministic=True, temperature=0)
                assert {**response.json(), "created": expected["created"]} == expected
                return response

            assert (await ask()).headers["x-verbatim-rollbacks"] == "0"
            assert toy.calls["/v1/draft"] == before["/v1/draft"]
            bodies = [json.loads(seen.body) for seen in upstream.received]
            assert {body["model"] for body in bodies} == {"theirs"}
            assert len(bodies) >= 3
            drafted = ids("something else altogether, so that no draft is right any more .........")
            assert (await ask()).headers["x-verbatim-rollbacks"] != "0"
            await upstream.__aexit__()
            await ask()


def test_hop_by_hop_headers_include_those_that_connection_names() -> None:
    headers = [
        (b"connection", b"close, X-One"),
        (b"connection", b"x-two"),
        (b"x-one", b"1"),
        (b"x-two", b"2"),
        (b"x-three", b"3"),
    ]
    assert end_to_end(headers) == [(b"x-three", b"3")]


POLICY = """
version: 1
defaults:
  limits: {requests_per_minute: 2, burst_s: 60, max_tokens: 50}
tenants:
  known:
    allowed_models: [m]
anonymous: known
"""


async def test_limits_and_bounds_of_a_policy_hold_here_too() -> None:
    upstream = MockUpstream()
    policies = FixedPolicy(load_policy(POLICY, "policy.yaml"))
    async with launch(upstream, policies=policies) as gateway:
        first = await post(gateway)
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-verbatim-policy"] == policies.current.version
        assert (await post(gateway, b'{"model":"m","temperature":3}')).status_code == 403
        assert (await post(gateway)).status_code == 200
        refused = await post(gateway)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert [json.loads(seen.body)["max_tokens"] for seen in upstream.received] == [50, 50]
        long = await post(gateway, b'{"model":"m","max_completion_tokens":51}')
        assert (long.status_code, long.json()["error"]["param"]) == (403, "max_completion_tokens")


async def test_what_was_judged_is_what_the_upstream_reads() -> None:
    """Whichever of two equal names it takes, and whether or not case matters to it."""
    upstream = MockUpstream()
    bounded = FixedPolicy(load_policy(POLICY.replace("requests_per_minute: 2, burst_s: 60, ", ""), "policy.yaml"))
    async with launch(upstream, policies=bounded) as gateway:
        for name in ("Model", "MAX_TOKENS", "max_to\\u212aens", "Top_P"):
            refused = await post(gateway, b'{"model":"m","%s":51}' % name.encode())
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == json.loads(f'"{name}"')
        assert not upstream.received
        assert (await post(gateway, b'{"max_tokens":51,"model":"m","max_tokens":7,"Vendor":1}')).status_code == 200
        assert upstream.received[0].body == b'{"max_tokens":7,"model":"m","Vendor":1}'


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b'{"model":"big", "model":"m"}', b'{"model":"m"}'),
        (b'{"mod\\u0065l":"big", "model":"m"}', b'{"model":"m"}'),
        (b'{"model":"m", "n":9, "n":1}', b'{"model":"m","n":1}'),
        (b'{"temperature":1.9, "temper\\u0061ture":1.0, "model":"m"}', b'{"temperature":1.0,"model":"m"}'),
        (b'{"model":"m", "x":1, "x":{"n": 1}, "n": 1}', b'{"model":"m","x":{"n": 1},"n":1}'),
        (b'{"model":"m", "x":1, "x":2}', b'{"model":"m", "x":1, "x":2}'),
    ],
)
async def test_of_two_equal_names_the_upstream_reads_the_one_that_was_judged(body: bytes, read: bytes) -> None:
    upstream = MockUpstream()
    policy = "version: 1\ndefaults: {sampling: {temperature: {max: 1}}}\ntenants: {all: {}}\nanonymous: all"
    async with launch(upstream, policies=FixedPolicy(load_policy(policy, "policy.yaml"))) as gateway:
        assert (await post(gateway, body)).status_code == 200
        assert upstream.received[0].body == read


async def test_a_name_that_is_no_text_is_refused() -> None:
    upstream = MockUpstream()
    async with launch(upstream) as gateway:
        refused = await post(gateway, b'{"model":"m","\xff":1}')
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert not upstream.received


@pytest.mark.parametrize(
    "path",
    [
        "/v1/%2e%2e/admin",
        "/v1/x/%2e%2e/%2E./admin",
        "/v1/%2e/x",
        "/v1//x",
        "/v1/x%3Fa=b",
        "/v1/x%23a",
        "/v1/x%5c..%5cy",
        "/v1/fine_tuning/jobs",
        "/v1/responses",
        "/v1/batches",
        "/v1/chat/completions/",
    ],
)
async def test_a_path_that_is_not_known_leads_to_no_upstream(path: str) -> None:
    upstream = MockUpstream()
    async with launch(upstream) as gateway:
        assert (await post(gateway, path=path)).status_code == 404
        assert not upstream.received
