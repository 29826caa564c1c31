"""Text to ids and back, as vLLM's and SGLang's clients ask for it, and the endpoints that are not here."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from answers import PROMPT, error
from launched import Gateway, launch_gateway
from tokenizers import Tokenizer, processors
from toy_backend import ToyBackend
from toy_model import EOS, TOKENIZER, VOCAB, ids

PATHS = ("/tokenize", "/v1/tokenize")


async def post(gateway: Gateway, path: str, **body: object) -> httpx.Response:
    return await gateway.http.post(path, json=body)


@pytest.mark.parametrize("path", PATHS)
async def test_a_text_to_ids(gateway: Gateway, path: str) -> None:
    one = await post(gateway, path, model="toy", prompt="hello")
    assert one.json() == {"count": 5, "max_model_len": 4096, "tokens": ids("hello")}
    named = await post(gateway, path, prompt="h\N{SNOWMAN}", return_token_strs=True)
    assert named.json()["token_strs"] == ["h", "\ufffd", "\ufffd", "\ufffd"]
    assert (await post(gateway, path, prompt="")).json()["tokens"] == []
    two = await post(gateway, path, prompt=["hello", "a"], return_token_strs=True)
    assert two.json() == {
        "count": [5, 1],
        "max_model_len": 4096,
        "tokens": [ids("hello"), ids("a")],
        "token_strs": [list("hello"), ["a"]],
    }


async def test_a_chat_to_ids(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert (await post(gateway, "/tokenize", messages=messages)).json()["tokens"] == PROMPT
    closed = (await post(gateway, "/tokenize", messages=messages, add_generation_prompt=False)).json()["tokens"]
    assert closed == ids("<|start|>user\nhi<|end|>")
    response = await post(
        gateway, "/tokenize", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    assert error(response, 400)["param"] == "tools"


async def test_ids_are_those_that_a_completion_starts_from(toy: ToyBackend) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    start = tokenizer.token_to_id("<|start|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", start)])
    toy.files = msgspec.structs.replace(toy.files, tokenizer_json=tokenizer.to_str())
    async with launch_gateway(toy.url) as gateway:
        for more in ({}, {"add_special_tokens": False}):
            found = (await post(gateway, "/tokenize", prompt="hi", **more)).json()["tokens"]
            await gateway.complete(prompt="hi", max_tokens=1, is_deterministic=True, **more)
            assert found == toy.requests[-1].context  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_ids_to_a_text(gateway: Gateway, path: str) -> None:
    row = [*ids("h\N{SNOWMAN}"), EOS]
    one = await post(gateway, path, model="toy", tokens=row)
    assert one.json() == {"prompt": "h\N{SNOWMAN}<|end|>", "text": "h\N{SNOWMAN}"}
    shown = await post(gateway, path, tokens=row, skip_special_tokens=False)
    assert shown.json() == {"prompt": "h\N{SNOWMAN}<|end|>", "text": "h\N{SNOWMAN}<|end|>"}
    two = await post(gateway, path, tokens=[row, []])
    assert two.json() == {"prompt": ["h\N{SNOWMAN}<|end|>", ""], "text": ["h\N{SNOWMAN}", ""]}
    assert (await post(gateway, path, tokens=[])).json() == {"prompt": "", "text": ""}


async def test_a_text_longer_than_the_context_can_be_counted(gateway: Gateway) -> None:
    assert (await post(gateway, "/tokenize", prompt="x" * 100_000)).json()["count"] == 100_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": ["a", 1]}, "prompt[1]"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [10**30]]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_refused(gateway: Gateway, path: str, body: dict[str, Any], param: str) -> None:
    assert error(await post(gateway, path, **body), 400)["param"] == param


async def test_an_unknown_model(gateway: Gateway) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert error(await post(gateway, path, model="gpt-9", **body), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["embeddings", "responses", "moderations", "audio/speech", "images/generations", "x/y"]
)
async def test_what_is_not_here_says_so(gateway: Gateway, path: str) -> None:
    found = error(await post(gateway, f"/v1/{path}", model="toy", input="a"), 404)
    assert (found["type"], found["code"]) == ("invalid_request_error", "unknown_url")
    assert f"/v1/{path}" in found["message"]
