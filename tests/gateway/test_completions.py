"""Text completions through the real thing: HTTP in, window protocol out, both over TCP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest
from answers import PROMPT, error, events, folded
from launched import Gateway, launch_gateway
from tokenizers import Tokenizer, processors
from toy_backend import Hang, Status, ToyBackend, on
from toy_model import EOS, TOKENIZER, VOCAB, ids, piece

from backend.protocol import Sampling, VerifyRequest
from gateway.domain import TextPrompt, TokenPrompt
from gateway.errors import RequestError
from gateway.openai_api.completion_request import RULES, parse_completion

USAGE = {"include_usage": True}
SNOWMAN = "\N{SNOWMAN}"


def texts(body: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [choice["text"] for choice in body["choices"]]


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verified", [True, False])
async def test_whole_answer(toy: ToyBackend, gateway: Gateway, verified: bool) -> None:
    toy.model.script = ids(" and goodbye")
    response = await gateway.complete(prompt="hello", is_deterministic=verified)
    body = response.json()
    assert {**body, "id": "", "created": 0} == {
        "id": "",
        "object": "text_completion",
        "created": 0,
        "model": "toy",
        "choices": [{"index": 0, "text": " and goodbye", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 13, "total_tokens": 18},
        "system_fingerprint": toy.fingerprint,
    }
    assert body["id"].startswith("cmpl-")
    assert response.headers["x-verbatim-determinism"] == ("verified" if verified else "off")
    assert response.headers["x-verbatim-seed"] == ("42" if verified else "1234")


async def test_sixteen_tokens_where_no_number_is_given(gateway: Gateway) -> None:
    for limit in ({}, {"max_tokens": None}):
        body = (await gateway.complete(**limit)).json()
        assert body["usage"]["completion_tokens"] == 16
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("verified", [True, False])
async def test_the_four_ways_to_write_a_prompt(gateway: Gateway, verified: bool) -> None:
    ask = {"is_deterministic": verified, "n": 2, "temperature": 0.7, "seed": 3}
    bodies = [
        (await gateway.complete(prompt=prompt, **ask)).json()
        for prompt in ("hello", ["hello"], ids("hello"), [ids("hello")])
    ]
    assert len({json.dumps(body["choices"]) for body in bodies}) == 1
    if verified:
        assert len({body["id"] for body in bodies}) == 1
    both = (await gateway.complete(prompt=["hello", "world!"], **ask)).json()
    assert both == {
        **(await gateway.complete(prompt=[ids("hello"), ids("world!")], **ask)).json(),
        "id": both["id"],
        "created": both["created"],
    }
    # prompt_index * n + choice
    assert texts(both)[:2] == texts(bodies[0])
    assert texts(both)[2:] == texts((await gateway.complete(prompt="world!", **ask)).json())
    assert len(set(texts(both))) == 4
    assert both["usage"] == {"prompt_tokens": 11, "completion_tokens": 64, "total_tokens": 75}


async def test_one_prompt_alone_and_inside_a_list_of_32(gateway: Gateway) -> None:
    ask = {"is_deterministic": True, "temperature": 0.6, "seed": 42, "logprobs": 5, "max_tokens": 30}
    alone = (await gateway.complete(prompt="Tell me more", **ask)).json()["choices"][0]
    prompts = [f"Tell me {n}" for n in range(32)]
    for place in (0, 17, 31):
        prompts[place] = "Tell me more"
        listed = (await gateway.complete(prompt=prompts, **ask)).json()["choices"]
        assert len(listed) == 32
        assert {**listed[place], "index": 0} == alone
    streamed = events(await gateway.complete(prompt=prompts, **ask, stream=True))
    pieces = [item["choices"][0] for item in streamed if isinstance(item, dict)]
    assert "".join(p["text"] for p in pieces if p["index"] == 17) == alone["text"]


async def test_the_seed_gives_the_same_tokens_at_both_endpoints(toy: ToyBackend, gateway: Gateway) -> None:
    ask = {"is_deterministic": True, "temperature": 0.7, "seed": 5, "max_tokens": 20, "n": 2}
    chat = (await gateway.chat(**ask, logprobs=True, top_logprobs=2)).json()["choices"]
    text = (await gateway.complete(**ask, prompt=PROMPT, logprobs=2)).json()["choices"]
    for one, other in zip(chat, text, strict=True):
        entries = one["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == other["logprobs"]["token_logprobs"]
        assert one["message"]["content"] == other["text"]
    contexts = {tuple(r.context) for r in toy.requests if isinstance(r, VerifyRequest) and not r.generated}
    assert contexts == {tuple(PROMPT)}


async def test_a_text_gets_the_tokenizers_special_tokens(toy: ToyBackend) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    start = tokenizer.token_to_id("<|start|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", start)])
    toy.files = msgspec.structs.replace(toy.files, tokenizer_json=tokenizer.to_str())
    async with launch_gateway(toy.url) as gateway:
        for ask, context in (
            ({"prompt": "hi"}, [start, *ids("hi")]),
            ({"prompt": ["hi"], "add_special_tokens": True}, [start, *ids("hi")]),
            ({"prompt": "hi", "add_special_tokens": False}, ids("hi")),
            ({"prompt": ids("hi")}, ids("hi")),
            ({"prompt": ""}, [start]),
        ):
            toy.requests.clear()
            await gateway.complete(**ask, is_deterministic=True, max_tokens=1)
            assert toy.requests == [VerifyRequest(context, 0, [], Sampling(seed=42), [EOS], 0)]
        # The template writes them itself.
        await gateway.chat(is_deterministic=True, max_tokens=1)
        assert toy.requests[-1] == VerifyRequest(PROMPT, 0, [], Sampling(seed=42), [EOS], 0)


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_echo(toy: ToyBackend, gateway: Gateway, stream: bool) -> None:
    toy.model.script = ids("!")
    prompts: list[tuple[Any, list[str]]] = [
        ("ho", ["ho!", "ho!"]),
        (["ho", f"h{SNOWMAN}"], ["ho!", "ho!", f"h{SNOWMAN}!", f"h{SNOWMAN}!"]),
        ([EOS, *ids("ho")], ["<|end|>ho!", "<|end|>ho!"]),
    ]
    for prompt, shown in prompts:
        response = await gateway.complete(prompt=prompt, echo=True, n=2, stream=stream, is_deterministic=True)
        if not stream:
            assert texts(response.json()) == shown
            continue
        found = [""] * len(shown)
        for item in events(response):
            if isinstance(item, dict):
                for choice in item["choices"]:
                    found[choice["index"]] += choice["text"]
        assert found == shown


async def test_echo_does_not_hide_a_stop_string_or_feed_one(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids("b stop c")
    body = (await gateway.complete(prompt="a stop a", echo=True, stop=["ab", "stop"])).json()
    assert texts(body) == ["a stop ab "]


async def test_legacy_logprobs(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = [*ids("a"), piece(" Paris"), *ids(SNOWMAN), *ids("b")]
    body = (await gateway.complete(is_deterministic=True, logprobs=2)).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == f"a Paris{SNOWMAN}b"
    assert logprobs["tokens"] == ["a", " Paris", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "b", "<|end|>"]
    assert logprobs["text_offset"] == [0, 1, 7, 7, 7, 8, 9]
    assert len(logprobs["tokens"]) == body["usage"]["completion_tokens"]
    context = ids("hi")
    for n, (logprob, top) in enumerate(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)):
        token = toy.model.next(context, n, Sampling(seed=42), 2)
        assert logprob == token.logprob  # exact, not approximate
        assert list(top.values()) == [scored.score for scored in token.top]
        assert top[logprobs["tokens"][n]] == logprob
        context.append(token.id)
    alone = (await gateway.complete(is_deterministic=True, logprobs=0)).json()["choices"][0]["logprobs"]
    chosen = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert alone == {**logprobs, "top_logprobs": [{token: logprob} for token, logprob in chosen]}


@pytest.mark.parametrize("verified", [True, False])
async def test_streamed_and_whole_are_the_same(toy: ToyBackend, gateway: Gateway, verified: bool) -> None:
    toy.model.script = [*ids("Hello"), piece(" Paris"), *ids(f" {SNOWMAN} or"), piece("Stop"), *ids(" now")]
    for ask in (
        {"logprobs": 3},
        {"logprobs": 1, "stop": "Stop"},
        {"n": 2, "prompt": ["a", "bc"], "logprobs": 0},
        {"echo": True, "prompt": "abc"},
        {"max_tokens": 8, "logprobs": 1},
        {"max_tokens": 1},
    ):
        whole = (await gateway.complete(is_deterministic=verified, **ask)).json()
        response = await gateway.complete(is_deterministic=verified, **ask, stream=True, stream_options=USAGE)
        assert response.headers["content-type"].startswith("text/event-stream")
        items = events(response)
        assert items.pop() == "[DONE]"
        if verified:
            assert items.pop().startswith(": verbatim windows=")
        usage = items.pop()
        assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
        for item in items:
            assert (item["object"], item["usage"]) == ("text_completion", None)
            assert not verified or item["id"] == whole["id"]
        assert folded(items) == whole["choices"]


async def test_the_id_tells_verified_requests_apart(gateway: Gateway) -> None:
    asks: list[dict[str, Any]] = [
        {},
        {"prompt": ["hi", "hi"]},
        {"n": 2},
        {"logprobs": 0},
        {"logprobs": 1},
        {"echo": True},
        {"max_tokens": 3},
        {"stop": "a"},
    ]
    base = {"max_tokens": 2, "is_deterministic": True}
    seen = [(await gateway.complete(**base | ask)).json()["id"] for ask in asks]
    chat = await gateway.chat(max_tokens=2, is_deterministic=True)
    same = await gateway.complete(prompt=PROMPT, max_tokens=2, is_deterministic=True)
    seen += [chat.json()["id"], same.json()["id"]]
    assert len({id_.rpartition("-")[2] for id_ in seen}) == len(seen)


async def test_the_official_client(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids("Hello, world.")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "toy", "prompt": ["one", "two"], "seed": 5, "logprobs": 2, "n": 2}
        whole = await client.completions.create(**ask)
        assert [choice.text for choice in whole.choices] == ["Hello, world."] * 4
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.text_offset is not None
        found = [""] * 4
        async for chunk in await client.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
        assert found == ["Hello, world."] * 4
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="toy", prompt="a", suffix="b")
        assert bad.value.param == "suffix"


# --- refusals --------------------------------------------------------------------------------------------------------


def parse(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "a"} | fields).encode(), None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1, -1]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt[0][0]"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[1], 1]}, "prompt"),
    ({"prompt": [1], "add_special_tokens": True}, "add_special_tokens"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"suffix": ""}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": "2"}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"echo": True, "logprobs": 0}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"temperature": 3}, "temperature"),
    ({"seed": "1"}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"n": 9}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"model": None}, "model"),
    ({"": 1}, ""),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.param == (param or None)
    assert param in caught.value.message


def test_a_prompt_is_what_it_looks_like() -> None:
    for given, prompts in (
        ("a", (TextPrompt("a"),)),
        (["a", ""], (TextPrompt("a"), TextPrompt(""))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1, 2], [3]], (TokenPrompt((1, 2)), TokenPrompt((3,)))),
    ):
        assert parse(prompt=given).order.prompts == prompts
    assert parse(best_of=2, n=2) == parse(n=2)
    assert parse(add_special_tokens=True, echo=False, user="u") == parse()
    for name, values in RULES.neutral.items():
        assert all(parse(**{name: value}) == parse() for value in values)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [3, VOCAB]}, "prompt"),
        ({"prompt": [[3], [10**30]]}, "prompt"),
        ({"prompt": ["hi", "x" * 5000]}, "prompt"),
        ({"prompt": [3] * 5000}, "prompt"),
        ({"prompt": [[3] * 4090, [3]], "max_tokens": 7}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_the_model_cannot_take_is_refused(
    toy: ToyBackend, gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    assert error(await gateway.complete(**fields), 400)["param"] == param
    assert not toy.requests


async def test_more_completions_than_there_will_ever_be_places_for(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, max_concurrent=8) as gateway:
        assert error(await gateway.complete(prompt=["a"] * 5, n=2), 400)["param"] == "prompt"
        assert len((await gateway.complete(prompt=["a"] * 4, n=2, max_tokens=1)).json()["choices"]) == 8


async def test_the_header_asks_for_the_guarantee_here_too(gateway: Gateway) -> None:
    body = {"model": "toy", "prompt": "hi", "max_tokens": 1}
    response = await gateway.http.post("/v1/completions", json=body, headers={"X-Verbatim-Determinism": "verified"})
    assert response.headers["x-verbatim-determinism"] == "verified"
    assert error(await gateway.complete(model="gpt-9"), 404)["code"] == "model_not_found"


# --- trouble ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("verified", "path"),
    [(True, "/v1/verify"), (True, "/v1/draft"), (False, "/v1/stream")],
    ids=lambda value: str(value),
)
async def test_a_client_that_leaves_ends_the_work_for_every_prompt(
    toy: ToyBackend, gateway: Gateway, stream: bool, verified: bool, path: str
) -> None:
    toy.faults = on(path, Hang())
    ask = gateway.complete(prompt=["a", "b", "c"], n=2, is_deterministic=verified, stream=stream, max_tokens=9)
    asking = asyncio.create_task(ask)
    for _ in range(6):
        await toy.hung.acquire()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for _ in range(6):
        await toy.left.acquire()
    await gateway.models.admission.wait_idle()


async def test_trouble_with_one_prompt_ends_all(toy: ToyBackend, gateway: Gateway) -> None:
    toy.faults = lambda path, nth: Status(500) if path == "/v1/verify" and nth == 3 else None
    ask: dict[str, Any] = {"prompt": ["a", "b"], "is_deterministic": True, "max_tokens": 40}
    assert error(await gateway.complete(**ask), 502)["code"] == "backend_failed"
    toy.calls.clear()
    items = events(await gateway.complete(**ask, stream=True))
    assert items[-1]["error"]["code"] == "backend_failed"
    assert "[DONE]" not in items
    await gateway.models.admission.wait_idle()


async def test_a_full_and_a_draining_gateway_refuse(toy: ToyBackend) -> None:
    toy.faults = on("/v1/verify", Hang())
    async with launch_gateway(toy.url, max_concurrent=8) as gateway:
        busy = asyncio.create_task(gateway.complete(prompt=["a"] * 7, is_deterministic=True))
        for _ in range(7):
            await toy.hung.acquire()
        response = await gateway.complete(prompt=["a", "b"], stream=True)
        assert error(response, 429)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        gateway.models.admission.drain()
        response = await gateway.complete()
        assert error(response, 503)["code"] == "shutting_down"
        assert response.headers["retry-after"] == "1"
        busy.cancel()
        await gateway.models.admission.wait_idle()
