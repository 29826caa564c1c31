"""Chat completions through the real thing: HTTP in, window protocol out, both over TCP."""

from __future__ import annotations

import asyncio
import itertools
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
from answers import PROMPT, error, events
from launched import Gateway, draw_same_seed, launch_gateway
from toy_backend import Drafter, Drop, Fault, Hang, HangAfter, Status, ToyBackend, on
from toy_model import EOS, VOCAB, ids, piece

from backend.protocol import DraftRequest, Health, Sampling, StreamRequest, VerifyRequest
from gateway.app import draw_seed
from gateway.domain import choice_seed
from gateway.errors import StartError

USAGE = {"include_usage": True}


def streamed_text(items: list[Any], index: int = 0) -> str:
    choices = [choice for item in items if isinstance(item, dict) for choice in item["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


def content(response: httpx.Response, index: int = 0) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][index]["message"]["content"]
    return text


# --- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verified", [True, False])
async def test_whole_answer(toy: ToyBackend, gateway: Gateway, verified: bool) -> None:
    toy.model.script = ids("Hello, world. How are you on this fine day?")
    response = await gateway.chat(is_deterministic=verified)
    body = response.json()
    assert content(response) == "Hello, world. How are you on this fine day?"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["logprobs"] is None
    assert body["object"] == "chat.completion"
    assert body["system_fingerprint"] == toy.fingerprint
    answered = len(toy.model.script) + 1  # the EOS is counted
    total = len(PROMPT) + answered
    assert body["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": answered, "total_tokens": total}
    assert response.headers["x-verbatim-determinism"] == ("verified" if verified else "off")
    assert response.headers["x-verbatim-seed"] == ("42" if verified else str(draw_same_seed()))
    assert response.headers["x-verbatim-fingerprint"] == toy.fingerprint
    assert ("x-verbatim-windows" in response.headers) == verified
    assert toy.calls["/v1/stream"] == (not verified)


@pytest.mark.parametrize("verified", [True, False])
async def test_streamed_answer(toy: ToyBackend, gateway: Gateway, verified: bool) -> None:
    toy.model.script = ids("Hello, \N{SNOWMAN} world.")
    whole = await gateway.chat(is_deterministic=verified)
    response = await gateway.chat(is_deterministic=verified, stream=True, stream_options=USAGE)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-verbatim-determinism"] == ("verified" if verified else "off")
    items = events(response)
    assert streamed_text(items) == content(whole) == "Hello, \N{SNOWMAN} world."
    assert items.pop() == "[DONE]"
    if verified:
        assert items.pop() == ": verbatim windows=3 rollbacks=0"
    assert items[-1]["choices"] == []
    assert items[-1]["usage"] == whole.json()["usage"]
    assert all(item["usage"] is None for item in items[:-1])
    assert items[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [item["choices"][0]["finish_reason"] for item in items[1:-1]] == [None] * 15 + ["stop"]
    assert len({item["id"] for item in items}) == 1
    if verified:
        assert items[0]["id"] == whole.json()["id"]


async def test_usage_is_only_sent_where_asked_for(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids("a")
    items = events(await gateway.chat(stream=True))
    assert all("usage" not in item and item["choices"] for item in items[:-1])


async def test_max_tokens_of_one_needs_the_verifier_once(toy: ToyBackend, gateway: Gateway) -> None:
    response = await gateway.chat(is_deterministic=True, max_tokens=1)
    assert response.json()["usage"]["completion_tokens"] == 1
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.headers["x-verbatim-windows"] == "1"
    assert toy.requests == [VerifyRequest(PROMPT, 0, [], Sampling(seed=42), [EOS], 0)]


DRAFTERS: dict[str, Drafter] = {
    "honest": lambda truth, count: truth,
    "empty": lambda truth, count: [],
    "always wrong": lambda truth, count: [(id_ + 1) % 256 for id_ in truth],
    "wrong at the third": lambda truth, count: [*truth[:2], 7, *truth[3:]],
    "too long": lambda truth, count: truth * 5,
    "out of vocabulary": lambda truth, count: [*truth[:4], VOCAB + 3, -1],
    "all EOS": lambda truth, count: [EOS] * count,
}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
@pytest.mark.parametrize("window", [1, 2, 16, 64])
async def test_no_drafter_changes_a_byte(toy: ToyBackend, drafter: Drafter, window: int) -> None:
    toy.drafter, toy.window = drafter, window
    async with launch_gateway(toy.url) as gateway:
        response = await gateway.chat(
            is_deterministic=True, max_tokens=50, logprobs=True, top_logprobs=3, temperature=0.7, seed=3
        )
    body = response.json()
    truth = toy.model.sequence(PROMPT, Sampling(temperature=0.7, seed=3), [EOS], 50)
    entries = body["choices"][0]["logprobs"]["content"]
    context = list(PROMPT)
    for n, (id_, entry) in enumerate(zip(truth, entries, strict=True)):
        token = toy.model.next(context, n, Sampling(temperature=0.7, seed=3), 3)
        assert entry["logprob"] == token.logprob  # exact, not approximate
        assert [top["logprob"] for top in entry["top_logprobs"]] == [top.score for top in token.top]
        context.append(id_)
    assert body["id"] == (await _reference(toy)).json()["id"]
    assert {**body, "created": 0} == {**(await _reference(toy)).json(), "created": 0}


async def test_a_verifier_that_decodes_by_itself_changes_no_byte(toy: ToyBackend) -> None:
    toy.wants_draft = False
    async with launch_gateway(toy.url) as gateway:
        response = await gateway.chat(
            is_deterministic=True, max_tokens=50, logprobs=True, top_logprobs=3, temperature=0.7, seed=3
        )
    assert toy.calls["/v1/draft"] == 0 and toy.calls["/v1/verify"] > 1
    toy.wants_draft = True
    assert {**response.json(), "created": 0} == {**(await _reference(toy)).json(), "created": 0}
    assert toy.calls["/v1/draft"] > 0


async def _reference(toy: ToyBackend) -> httpx.Response:
    toy.drafter, toy.window = DRAFTERS["honest"], 16
    async with launch_gateway(toy.url) as gateway:
        return await gateway.chat(
            is_deterministic=True, max_tokens=50, logprobs=True, top_logprobs=3, temperature=0.7, seed=3
        )


async def test_rollbacks_are_told(toy: ToyBackend, gateway: Gateway) -> None:
    toy.drafter = DRAFTERS["always wrong"]
    response = await gateway.chat(is_deterministic=True, max_tokens=5)
    # The last token leaves no room for a draft.
    assert (response.headers["x-verbatim-windows"], response.headers["x-verbatim-rollbacks"]) == ("5", "3")
    items = events(await gateway.chat(is_deterministic=True, max_tokens=5, stream=True))
    assert items[-2:] == [": verbatim windows=5 rollbacks=3", "[DONE]"]


async def test_a_verified_stream_repeats_to_the_byte(toy: ToyBackend, gateway: Gateway) -> None:
    ask: dict[str, Any] = {"is_deterministic": True, "stream": True, "max_tokens": 40, "logprobs": True}
    first = events(await gateway.chat(**ask))
    toy.drafter = DRAFTERS["wrong at the third"]
    second = events(await gateway.chat(**ask))
    for item in (*first, *second):
        if isinstance(item, dict):
            item["created"] = 0
    assert first[-2] != second[-2]  # the comment tells the cost
    assert first[:-2] == second[:-2]


async def test_an_unverified_answer_has_an_id_of_its_own(gateway: Gateway) -> None:
    first, second = [(await gateway.chat(max_tokens=2)).json() for _ in range(2)]
    assert first["id"] != second["id"]


async def test_the_id_tells_verified_requests_apart(gateway: Gateway) -> None:
    asks: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"temperature": 0},
        {"top_p": 0.9},
        {"top_k": 1},
        {"min_p": 0.1},
        {"max_tokens": 3},
        {"stop": ["a"]},
        {"stop": ["a", "b"]},
        {"n": 2},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 1},
        {"ignore_eos": True},
        {"stop_token_ids": [3]},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"3": 1}},
        {"min_tokens": 1},
        {"messages": [{"role": "user", "content": "ho"}]},
    ]
    seen = [(await gateway.chat(**{"max_tokens": 2, "is_deterministic": True} | ask)).json()["id"] for ask in asks]
    assert len(set(seen)) == len(asks)
    same = await gateway.chat(max_tokens=2, is_deterministic=True, seed=42, temperature=1.0, user="me")
    assert same.json()["id"] == seen[0]


# --- seeds, choices, views -------------------------------------------------------------------------------------------


async def test_choices_have_seeds_of_their_own(toy: ToyBackend, gateway: Gateway) -> None:
    response = await gateway.chat(is_deterministic=True, n=3, max_tokens=12, seed=7, logprobs=True)
    seeds = {request.sampling.seed for request in toy.requests if isinstance(request, VerifyRequest)}
    assert seeds == {7, choice_seed(7, 1), choice_seed(7, 2)}
    assert len({content(response, i) for i in range(3)}) == 3
    assert response.json()["usage"]["completion_tokens"] == 36
    alone = await gateway.chat(is_deterministic=True, max_tokens=12, seed=7, logprobs=True)
    assert alone.json()["choices"][0] == response.json()["choices"][0]
    items = events(await gateway.chat(is_deterministic=True, n=3, max_tokens=12, seed=7, stream=True))
    assert [streamed_text(items, i) for i in range(3)] == [content(response, i) for i in range(3)]


async def test_the_seed_reaches_both_lanes(toy: ToyBackend, gateway: Gateway) -> None:
    ask = {"seed": -9, "temperature": 0.6, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 3}
    await gateway.chat(**ask)
    await gateway.chat(**ask, is_deterministic=True)
    expected = Sampling(0.6, 0.5, 3, 0.1, -9)
    assert {type(request) for request in toy.requests} == {StreamRequest, DraftRequest, VerifyRequest}
    assert all(request.sampling == expected for request in toy.requests)  # type: ignore[attr-defined]


async def test_penalties_and_biases_reach_both_lanes(toy: ToyBackend, gateway: Gateway) -> None:
    ask = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"12": -100, "3": 2.5},
        "min_tokens": 2,
        "stop_token_ids": [7, EOS, 5],
        "seed": 1,
        "max_tokens": 3,
    }
    await gateway.chat(**ask)
    await gateway.chat(**ask, is_deterministic=True)
    expected = Sampling(1.0, 1.0, 0, 0.0, 1, 0.5, -1.0, 1.2, ((3, 2.5), (12, -100.0)), 2)
    assert {type(request) for request in toy.requests} == {StreamRequest, DraftRequest, VerifyRequest}
    for request in toy.requests:
        assert isinstance(request, StreamRequest | DraftRequest | VerifyRequest)
        assert (request.sampling, request.stop_ids) == (expected, [EOS, 5, 7])


@pytest.mark.parametrize("verified", [True, False])
async def test_a_stop_token_id_ends_the_answer(toy: ToyBackend, gateway: Gateway, verified: bool) -> None:
    toy.model.script = ids("one. two")
    (dot,) = ids(".")
    for ignore_eos in (False, True):
        response = await gateway.chat(is_deterministic=verified, stop_token_ids=[dot], ignore_eos=ignore_eos)
        assert content(response) == "one."
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        assert response.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"stop_token_ids": [3, VOCAB]}, "stop_token_ids"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"min_tokens": 4096}, "min_tokens"),
        ({"min_tokens": 10**30}, "min_tokens"),
    ],
)
async def test_what_the_model_has_no_tokens_for_is_refused(
    toy: ToyBackend, gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    assert error(await gateway.chat(**fields), 400)["param"] == param
    assert not toy.requests


async def test_who_asks_for_nothing_gets_another_answer_each_time(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, itertools.count(7).__next__) as gateway:
        first, second = [await gateway.chat(max_tokens=12) for _ in range(2)]
        assert [first.headers["x-verbatim-seed"], second.headers["x-verbatim-seed"]] == ["7", "8"]
        assert content(first) != content(second)
        again = await gateway.chat(max_tokens=12, seed=int(second.headers["x-verbatim-seed"]))
        assert content(again) == content(second)
        # Neither a seed that is given nor the guarantee takes one from the drawer.
        await gateway.chat(max_tokens=1, is_deterministic=True)
        assert (await gateway.chat(max_tokens=1)).headers["x-verbatim-seed"] == "9"


def test_drawn_seeds_differ_and_can_be_sent_back() -> None:
    seeds = [draw_seed() for _ in range(100)]
    assert len(set(seeds)) == 100
    assert all(int(float(seed)) == seed >= 0 for seed in seeds)


async def test_a_shorter_answer_is_the_beginning_of_a_longer_one(gateway: Gateway) -> None:
    texts = [content(await gateway.chat(is_deterministic=True, max_tokens=n)) for n in range(1, 40, 3)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


async def test_ignore_eos_runs_on(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = [*ids("a"), EOS, *ids("b"), EOS]
    response = await gateway.chat(is_deterministic=True, ignore_eos=True, max_tokens=3)
    assert content(response) == "ab"
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_without_max_tokens_the_context_is_the_limit(toy: ToyBackend) -> None:
    toy.max_context = len(PROMPT) + 30
    async with launch_gateway(toy.url) as gateway:
        for verified in (True, False):
            response = await gateway.chat(is_deterministic=verified)
            assert response.json()["usage"]["completion_tokens"] == 30
            assert response.json()["choices"][0]["finish_reason"] == "length"


# --- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings(toy: ToyBackend, gateway: Gateway, verified: bool, stream: bool) -> None:
    toy.model.script = [*ids("Go to"), piece(" Paris"), *ids(" or "), piece("Stop"), piece("!!"), *ids(" now and ever")]
    for stop, cut, consumed in (
        ("Pari", "Go to ", 6),
        (["Stop!", "zzz"], "Go to Paris or ", 12),
        ("or Stop!!", "Go to Paris ", 12),
        ("nowhere", "Go to Paris or Stop!! now and ever", 26),
        ("r", "Go to Pa", 6),
        ("Go", "", 2),
    ):
        response = await gateway.chat(
            is_deterministic=verified, stop=stop, stream=stream, logprobs=True, stream_options=USAGE if stream else None
        )
        if stream:
            items = [item for item in events(response) if isinstance(item, dict)]
            text, usage = streamed_text(items), items[-1]["usage"]
            finish = items[-2]["choices"][0]["finish_reason"]
            shown = [item["choices"][0]["logprobs"] for item in items[:-1]]
            entries = [entry for logprobs in shown if logprobs for entry in logprobs["content"]]
        else:
            choice, usage = response.json()["choices"][0], response.json()["usage"]
            text, finish, entries = choice["message"]["content"], choice["finish_reason"], choice["logprobs"]["content"]
        assert (text, finish, usage["completion_tokens"]) == (cut, "stop", consumed)
        assert len(entries) == consumed


# --- company ---------------------------------------------------------------------------------------------------------


async def test_company_changes_nothing(gateway: Gateway) -> None:
    async def ask(n: int) -> Any:
        prompt = [{"role": "user", "content": "x" * n}]
        response = await gateway.chat(
            is_deterministic=True, messages=prompt, max_tokens=30, logprobs=True, top_logprobs=5, temperature=0.6
        )
        return {**response.json(), "created": 0}

    alone = [await ask(n) for n in range(12)]
    together = await asyncio.gather(*(ask(n) for n in range(12)))
    assert together == alone


# --- refusals --------------------------------------------------------------------------------------------------------


async def test_unknown_model(gateway: Gateway) -> None:
    found = error(await gateway.chat(model="gpt-9"), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_field_is_named(gateway: Gateway, stream: bool) -> None:
    found = error(await gateway.chat(stream=stream, max_tokens=-1), 400)
    assert (found["type"], found["param"]) == ("invalid_request_error", "max_tokens")


async def test_contradiction_and_unknown_mode(gateway: Gateway) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for header, said, param in (("off", True, "is_deterministic"), ("maybe", None, "X-Verbatim-Determinism")):
        response = await gateway.http.post(
            "/v1/chat/completions",
            json={**body, "is_deterministic": said},
            headers={"X-Verbatim-Determinism": header},
        )
        assert error(response, 400)["param"] == param
    response = await gateway.http.post(
        "/v1/chat/completions", json=body, headers={"X-Verbatim-Determinism": "verified"}
    )
    assert response.headers["x-verbatim-determinism"] == "verified"


async def test_the_context_is_kept_to(toy: ToyBackend) -> None:
    toy.max_context = len(PROMPT) + 5
    async with launch_gateway(toy.url) as gateway:
        fits = await gateway.chat(is_deterministic=True, max_tokens=5)
        assert fits.json()["usage"]["completion_tokens"] == 5
        found = error(await gateway.chat(max_tokens=6), 400)
        assert (found["code"], found["param"]) == ("context_length_exceeded", "max_tokens")
        found = error(await gateway.chat(max_completion_tokens=6), 400)
        assert (found["code"], found["param"]) == ("context_length_exceeded", "max_completion_tokens")
        found = error(await gateway.chat(messages=[{"role": "user", "content": "long enough"}]), 400)
        assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")
        assert f"make {len(PROMPT) + len('long enough') - len('hi')} tokens" in found["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * 1_000_000}],
        [{"role": "user", "content": "x"}] * 20_000,
        [{"role": "user", "content": "x", "name": "y" * 1_000_000}],
    ],
    ids=["long", "many", "long name"],
)
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    toy: ToyBackend, messages: list[dict[str, str]]
) -> None:
    shown = "{{ messages[0]['name'] }}" if "name" in messages[0] else ""
    toy.files = msgspec.structs.replace(toy.files, chat_template=f"{toy.files.chat_template}{shown}")
    async with launch_gateway(toy.url) as gateway:
        found = error(await gateway.chat(messages=messages), 400)
        assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")
        assert "at least" in found["message"]


async def test_messages_that_make_no_token_are_refused(toy: ToyBackend) -> None:
    toy.files = msgspec.structs.replace(toy.files, chat_template="")
    async with launch_gateway(toy.url) as gateway:
        assert error(await gateway.chat(), 400)["param"] == "messages"


async def test_a_long_prompt_that_fits_is_answered(toy: ToyBackend) -> None:
    toy.max_context = 200_000
    async with launch_gateway(toy.url) as gateway:
        response = await gateway.chat(messages=[{"role": "user", "content": "x" * 100_000}], max_tokens=1)
        assert response.json()["usage"]["prompt_tokens"] == len(PROMPT) - len("hi") + 100_000


@pytest.mark.parametrize("depth", [450, 600, 800, 900, 5_000])
async def test_a_connection_survives_deep_nesting(gateway: Gateway, depth: int) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model": "toy", "messages": ' + b"[" * depth + b"]" * depth + b"}"
    for _ in range(2):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        assert b"nested too deeply" in await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()


async def test_paths_and_methods(gateway: Gateway) -> None:
    assert "/v1/nothing" in error(await gateway.http.get("/v1/nothing"), 404)["message"]
    response = await gateway.http.get("/v1/chat/completions")
    assert "GET" in error(response, 405)["message"]
    assert response.headers["allow"] == "POST"


async def test_bodies(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, max_body_bytes=1000) as gateway:
        post = gateway.http.post
        error(await post("/v1/chat/completions", content=b"{"), 400)
        error(await post("/v1/chat/completions", content=b"\xff"), 400)
        error(await post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"}), 415)
        error(await post("/v1/chat/completions", content=b" " * 1001), 413)
        error(await post("/v1/chat/completions", content=b" " * 1_000_000), 413)

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        error(await post("/v1/chat/completions", content=pieces()), 413)
        assert toy.requests == []


async def test_models(gateway: Gateway) -> None:
    listed = (await gateway.http.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["toy"]
    assert (await gateway.http.get("/v1/models/toy")).json() == listed["data"][0]
    assert error(await gateway.http.get("/v1/models/meta/llama"), 404)["code"] == "model_not_found"


async def test_request_ids(gateway: Gateway) -> None:
    given = await gateway.http.get("/healthz", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for bad in ("x" * 200, "a\tb"):
        made = await gateway.http.get("/nowhere", headers={"x-request-id": bad})
        assert len(made.headers["x-request-id"]) == 32


async def test_health(toy: ToyBackend, gateway: Gateway) -> None:
    assert (await gateway.http.get("/healthz")).json() == {"status": "ready"}
    head = await gateway.http.head("/healthz")
    assert (head.status_code, head.content) == (200, b"")
    toy.health = Health("loading", 0.5)
    await gateway.check()
    response = await gateway.http.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (503, "backend_unavailable")
    assert response.json()["detail"] == {"toy": f"{toy.url}: it is loading, 50% done"}
    toy.health = Health("ready", 1.0)
    await gateway.check()
    assert (await gateway.http.get("/healthz")).status_code == 200
    toy.faults = on("/healthz", Status(500))
    await gateway.check()
    response = await gateway.http.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (503, "backend_unavailable")


@pytest.mark.parametrize("stream", [True, False])
async def test_our_own_failure_has_an_envelope_too(toy: ToyBackend, stream: bool) -> None:
    def draw_seed() -> int:
        raise ZeroDivisionError("ours")

    async with launch_gateway(toy.url, draw_seed) as gateway:
        assert error(await gateway.chat(stream=stream), 500)["message"] == "internal error"
        await gateway.models.admission.wait_idle()


async def test_start_is_refused_where_the_protocol_differs(toy: ToyBackend) -> None:
    toy.protocol = 99
    with pytest.raises(StartError, match="window protocol 99"):
        async with launch_gateway(toy.url):
            pass


async def test_start_waits_for_the_backend(toy: ToyBackend) -> None:
    loading = msgspec.json.encode(Health("loading", 0.5))
    toy.faults = lambda path, nth: Status(503, loading) if path == "/healthz" and nth < 2 else None
    async with launch_gateway(toy.url) as gateway:
        assert toy.calls["/healthz"] == 3
        assert (await gateway.chat(max_tokens=1)).status_code == 200


async def test_start_does_not_wait_for_ever(toy: ToyBackend) -> None:
    toy.health = Health("loading", 0.5)
    with pytest.raises(StartError, match=r"no backend is ready after 0\.5 s: .*it is loading, 50% done"):
        async with launch_gateway(toy.url, start_timeout_s=0.5):
            pass


# --- capacity --------------------------------------------------------------------------------------------------------


async def test_a_full_gateway_refuses_before_any_work(toy: ToyBackend) -> None:
    toy.faults = on("/v1/verify", Hang())
    async with launch_gateway(toy.url, max_concurrent=8) as gateway:
        busy = asyncio.create_task(gateway.chat(is_deterministic=True, n=7))
        for _ in range(7):
            await toy.hung.acquire()
        calls = toy.calls.total()
        response = await gateway.chat(is_deterministic=True, n=2, stream=True)
        found = error(response, 429)
        assert found["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        assert toy.calls.total() == calls
        toy.faults = lambda path, nth: None
        assert (await gateway.chat(is_deterministic=True, max_tokens=1)).status_code == 200
        busy.cancel()
        await gateway.models.admission.wait_idle()


async def test_a_draining_gateway_refuses(gateway: Gateway) -> None:
    gateway.models.admission.drain()
    response = await gateway.chat()
    assert error(response, 503)["code"] == "shutting_down"
    assert response.headers["retry-after"] == "1"
    assert (await gateway.http.get("/healthz")).status_code == 503


@pytest.mark.parametrize(
    ("roles", "verified", "status"),
    [
        (("draft",), True, 503),
        (("draft",), False, 200),
        (("verify",), True, 200),
        (("verify",), False, 503),
    ],
)
async def test_roles(toy: ToyBackend, roles: tuple[str, ...], verified: bool, status: int) -> None:
    toy.roles = roles
    async with launch_gateway(toy.url) as gateway:
        response = await gateway.chat(is_deterministic=verified, max_tokens=4)
        assert response.status_code == status
        if status == 503:
            assert response.json()["error"]["code"] == "role_refused"
        elif verified:
            assert toy.calls["/v1/draft"] == 0
            assert toy.calls["/v1/verify"] == 4  # a token at a time


# --- a backend in trouble --------------------------------------------------------------------------------------------

TROUBLE: list[tuple[Fault, int, str]] = [
    (Status(500), 502, "backend_failed"),
    (Status(503), 503, "backend_unavailable"),
    (Status(429, headers=(("retry-after", "9"),)), 429, "backend_refused"),
    (Status(400), 400, "backend_refused"),
    (Status(413), 413, "backend_refused"),
    (Status(422), 422, "backend_refused"),
    (Status(409), 503, "role_refused"),
    (Status(200, b"{}"), 502, "backend_failed"),
    (Drop(5), 502, "backend_failed"),
]


@pytest.mark.parametrize(("fault", "status", "code"), TROUBLE)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/verify", "/v1/stream"])
async def test_trouble_before_the_first_byte(
    toy: ToyBackend, gateway: Gateway, fault: Fault, status: int, code: str, stream: bool, path: str
) -> None:
    toy.faults = on(path, fault)
    response = await gateway.chat(is_deterministic=path == "/v1/verify", stream=stream)
    assert error(response, status)["code"] == code
    if status == 429:
        assert response.headers["retry-after"] == "9"
    await gateway.models.admission.wait_idle()


@pytest.mark.parametrize("fault", [Status(500), Status(503), Status(200, b"{}"), Drop(5)])
async def test_trouble_in_mid_stream(toy: ToyBackend, gateway: Gateway, fault: Fault) -> None:
    toy.faults = lambda p, n: fault if p == "/v1/verify" and n >= 1 else None
    response = await gateway.chat(is_deterministic=True, stream=True)
    assert response.status_code == 200
    items = events(response)
    assert items[-1]["error"]["type"] == "backend_error"
    assert "[DONE]" not in items
    assert all("choices" in item for item in items[:-1])
    whole = await gateway.chat(is_deterministic=True)
    assert error(whole, (items[-1]["error"]["code"] == "backend_unavailable" and 503) or 502)


@pytest.mark.parametrize("fault", [Status(500), Status(503), Status(200, b"{}"), Drop(5)])
async def test_trouble_with_drafts_changes_no_byte(toy: ToyBackend, gateway: Gateway, fault: Fault) -> None:
    ask: dict[str, Any] = {"is_deterministic": True, "max_tokens": 60, "logprobs": True}
    undisturbed = (await gateway.chat(**ask)).json()
    assert toy.calls["/v1/draft"] > 1
    toy.calls.clear()
    toy.faults = lambda p, n: fault if p == "/v1/draft" and n >= 1 else None
    response = await gateway.chat(**ask)
    assert {**response.json(), "created": 0} == {**undisturbed, "created": 0}


@pytest.mark.parametrize("after", [200, 400, 1000])
async def test_a_fast_stream_that_breaks_off(toy: ToyBackend, gateway: Gateway, after: int) -> None:
    toy.faults = on("/v1/stream", Drop(after))
    items = events(await gateway.chat(stream=True, max_tokens=100))
    assert items[-1]["error"]["code"] == "backend_failed"
    assert "[DONE]" not in items


async def test_a_backend_that_lies(toy: ToyBackend, gateway: Gateway) -> None:
    toy.fingerprint = "someone-else"
    found = error(await gateway.chat(is_deterministic=True), 502)
    assert found["code"] == "backend_protocol_violation"
    assert "someone-else" in found["message"]


async def test_a_slow_backend_times_out(toy: ToyBackend) -> None:
    toy.faults = on("/v1/verify", Hang())
    async with launch_gateway(toy.url, first_byte_timeout_s=0.05) as gateway:
        assert error(await gateway.chat(is_deterministic=True, stream=True), 504)["code"] == "backend_timeout"
        await toy.left.acquire()


async def test_one_choice_in_trouble_ends_all(toy: ToyBackend, gateway: Gateway) -> None:
    toy.faults = lambda path, nth: (Status(500) if nth == 2 else Hang()) if path == "/v1/verify" else None
    error(await gateway.chat(is_deterministic=True, n=4), 502)
    await toy.left.acquire()
    await gateway.models.admission.wait_idle()


# --- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("verified", "faults"),
    [
        (True, on("/v1/verify", Hang())),
        (True, on("/v1/draft", Hang())),
        (True, lambda path, nth: Hang() if path == "/v1/verify" and nth >= 3 else None),
        (False, on("/v1/stream", Hang())),
        (False, on("/v1/stream", HangAfter(1))),
        (False, on("/v1/stream", HangAfter(0))),
    ],
    ids=["prefill", "draft", "verify", "stream before the head", "in the stream", "stream before the first token"],
)
async def test_a_client_that_leaves_ends_the_backends_work(
    toy: ToyBackend, gateway: Gateway, stream: bool, n: int, verified: bool, faults: Any
) -> None:
    toy.faults = faults
    asking = asyncio.create_task(gateway.chat(is_deterministic=verified, stream=stream, n=n, max_tokens=99))
    for _ in range(n):
        await toy.hung.acquire()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for _ in range(n):
        await toy.left.acquire()
    await gateway.models.admission.wait_idle()
    toy.faults = lambda path, nth: None
    assert (await gateway.chat(is_deterministic=verified, max_tokens=2)).status_code == 200


async def test_a_client_that_leaves_while_reading(toy: ToyBackend, gateway: Gateway) -> None:
    toy.faults = lambda path, nth: Hang() if path == "/v1/verify" and nth >= 2 else None
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "is_deterministic": True, "stream": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()  # kept: a dropped iterator would close the connection by itself
        assert (await anext(lines)).startswith("data: ")
        await toy.hung.acquire()
    await toy.left.acquire()
    await gateway.models.admission.wait_idle()


async def test_a_client_that_leaves_while_sending(toy: ToyBackend, gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await gateway.chat(max_tokens=1)).status_code == 200
    assert toy.calls["/v1/stream"] == 1
