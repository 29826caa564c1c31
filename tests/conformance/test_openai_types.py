"""Every answer and every chunk is what OpenAI's published types say, and no more than that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import httpx
import pytest
from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

T = TypeVar("T", bound=BaseModel)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


class StreamedChoice(CompletionChoice):
    """The published type is for whole answers; OpenAI's streams have null here until the end."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class StreamedCompletion(Completion):
    choices: list[StreamedChoice]  # type: ignore[assignment]


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


def conforms(type_: type[T], data: object, *, ours: frozenset[str] = frozenset()) -> T:
    """Strictly: no value is converted, no field is unknown but `ours`."""
    value = type_.model_validate_json(json.dumps(data), strict=True)
    assert _extra(value) <= ours
    return value


def _extra(value: object) -> set[str]:
    if isinstance(value, BaseModel):
        fields = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or ()).union(*map(_extra, fields))
    if isinstance(value, list):
        return set().union(*map(_extra, value))
    return set()


def stream(response: httpx.Response) -> list[Any]:
    """The events' data, by the rules of server-sent events."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    lines = [line for block in blocks for line in block.split("\n") if not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


SAY = {"messages": [{"role": "user", "content": ":::Hello \N{SNOWMAN} there"}]}
CHATS: dict[str, dict[str, Any]] = {
    "plain": SAY,
    "choices": SAY | {"n": 3, "max_completion_tokens": 5, "temperature": 0.5},
    "logprobs": SAY | {"logprobs": True, "top_logprobs": 3},
    "cut": SAY | {"stop": ["there"], "seed": 1},
    "a call": {"messages": [{"role": "user", "content": f":::Well. {CALL}"}], "tools": TOOLS},
    "two calls": {"messages": [{"role": "user", "content": f":::{CALL}{CALL}"}], "tools": TOOLS, "logprobs": True},
    "no call": SAY | {"tools": TOOLS, "tool_choice": "auto"},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Hello \N{SNOWMAN}"},
    "list": {"prompt": ["a", "bc"], "n": 2, "max_tokens": 1},
    "ids": {"prompt": [1, 2, 3], "logprobs": 0},
    "logprobs": {"prompt": "Hello", "logprobs": 5, "stop": "lo"},
    "echo": {"prompt": "Hello", "echo": True},
}


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("name", CHATS)
def test_chat_completions(http: httpx.Client, name: str, verified: bool) -> None:
    ask = {"model": "toy", "is_deterministic": verified} | CHATS[name]
    whole = conforms(ChatCompletion, http.post("/v1/chat/completions", json=ask).json())
    assert len(whole.choices) == ask.get("n", 1)
    if name == "a call":
        assert whole.choices[0].finish_reason == "tool_calls"
    for options in (None, {"include_usage": True}):
        chunks = stream(http.post("/v1/chat/completions", json=ask | {"stream": True, "stream_options": options}))
        parsed = [conforms(ChatCompletionChunk, chunk) for chunk in chunks]
        if options:
            last = parsed.pop()
            assert (last.choices, last.usage) == ([], whole.usage)
        assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in parsed)
        assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in parsed}) == 1


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_completions(http: httpx.Client, name: str, verified: bool) -> None:
    ask = {"model": "toy", "is_deterministic": verified} | TEXTS[name]
    whole = conforms(Completion, http.post("/v1/completions", json=ask).json())
    for options in (None, {"include_usage": True}):
        chunks = stream(http.post("/v1/completions", json=ask | {"stream": True, "stream_options": options}))
        parsed = [conforms(StreamedCompletion, chunk) for chunk in chunks]
        if options:
            last = parsed.pop()
            assert (last.choices, last.usage) == ([], whole.usage)
        assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in parsed)


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert set(listed) == {"object", "data"} and listed["object"] == "list"
    for card in (*listed["data"], http.get("/v1/models/toy").json()):
        conforms(Model, card, ours=frozenset({"max_model_len"}))


ERRORS: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/chat/completions", {}, 400),
    ("POST", "/v1/chat/completions", {"model": "toy", **SAY, "max_tokens": -1}, 400),
    ("POST", "/v1/chat/completions", {"model": "toy", **SAY, "max_tokens": -1, "stream": True}, 400),
    ("POST", "/v1/chat/completions", {"model": "toy", **SAY, "max_tokens": 10**6}, 400),
    ("POST", "/v1/chat/completions", {"model": "gpt-9", **SAY}, 404),
    ("POST", "/v1/completions", {"model": "toy", "prompt": "a", "suffix": "b"}, 400),
    ("POST", "/v1/completions", {"model": "gpt-9", "prompt": "a", "stream": True}, 404),
    ("POST", "/v1/embeddings", {"model": "toy", "input": "a"}, 404),
    ("POST", "/v1/responses", {"model": "toy", "input": "a"}, 404),
    ("GET", "/v1/models/gpt-9", None, 404),
    ("GET", "/v1/chat/completions", None, 405),
    ("GET", "/", None, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ERRORS)
def test_errors(http: httpx.Client, method: str, path: str, body: object, status: int) -> None:
    response = http.request(method, path, json=body)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert set(response.json()) == {"error"}
    conforms(ErrorObject, response.json()["error"])
