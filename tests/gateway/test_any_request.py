"""Whatever a client sends: never a server error, always the envelope, and the same answer streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from answers import error, events, folded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Served, served
from toy_backend import ToyBackend
from toy_model import EOS, FILES, VOCAB, ids, piece
from toy_tools import CALL, TEMPLATE, TIME, WEATHER

from gateway.openai_api import chat_request, completion_request

PATHS = {
    "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "toy", "prompt": "hi"},
}
OTHER_PATHS = {
    "/tokenize": {"prompt": "hi"},
    "/v1/tokenize": {"messages": [{"role": "user", "content": "hi"}]},
    "/detokenize": {"tokens": [1, 2]},
}
RULES = (chat_request.RULES, completion_request.RULES)
FIELDS = sorted(
    {
        *("tokens", "return_token_strs", "skip_special_tokens"),
        *(name for part in (*chat_request.PARTS, *completion_request.PARTS) for name in part.__struct_fields__),
        *(
            name
            for rules in (chat_request.RULES, completion_request.RULES)
            for name in (*rules.neutral, *rules.refused)
        ),
    }
)
ORDINARY: list[Any] = [
    *(
        0,
        1,
        -1,
        2,
        5,
        0.5,
        1e400,
        10**30,
        VOCAB,
        True,
        False,
        None,
        "",
        "x",
        "auto",
        "none",
        "required",
        [],
        {},
        [None],
    ),
    *([1, 2], [[1], [2]], ["a", "b"], {"50": 1}, {"include_usage": True}, [WEATHER], {"thinking": 1}, {"type": "text"}),
    *([{"role": "user", "content": "a"}], [{"role": "assistant", "content": "a"}], [{"role": "tool", "content": []}]),
    {"type": "function", "function": {"name": "weather"}},
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        }
    ],
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    toy = ToyBackend(max_context=200, files=msgspec.structs.replace(FILES, chat_template=TEMPLATE))
    with served(toy) as found:
        yield found


@pytest.fixture(scope="module")
def http(running: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client:
        yield client


def check(response: httpx.Response) -> None:
    if response.status_code == 200:
        body = response.json() if response.headers["content-type"] == "application/json" else response.text
        assert any(name in body for name in ("choices", "tokens", "prompt"))
    else:
        assert 400 <= response.status_code < 500, response.text
        found = error(response, response.status_code)
        assert found["message"] and found["type"] == "invalid_request_error"


fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(
    st.sampled_from(sorted(PATHS | OTHER_PATHS)),
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(ORDINARY) | JSON, max_size=4),
)
def test_any_fields(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    body = (PATHS | OTHER_PATHS)[path] | fields
    check(http.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))


@fuzz
@given(
    st.sampled_from(sorted(PATHS | OTHER_PATHS)),
    st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_any_body(http: httpx.Client, path: str, content: bytes) -> None:
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    check(response)


WORDS = [*ids("ab Stop now"), *ids(CALL), piece("Stop"), piece(" Paris"), piece("!!"), EOS, *ids("\N{SNOWMAN}"), 200]
COMMON = st.fixed_dictionaries(
    {"is_deterministic": st.booleans()},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 40),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from(["Stop", "op", ["ab", "!!"], ["a", "b", "c", "d"], "\N{SNOWMAN}"]),
        "stop_token_ids": st.just([piece("!!")]),
        "ignore_eos": st.booleans(),
    },
)
CHAT = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.booleans(),
        "tools": st.just([WEATHER, TIME]),
        "parallel_tool_calls": st.booleans(),
        "tool_choice": st.sampled_from(
            ["auto", "none", "required", {"type": "function", "function": {"name": "time"}}]
        ),
    },
)
TEXT = st.fixed_dictionaries(
    {},
    optional={"prompt": st.sampled_from(["a", "", ["a", "bc"], [1, 2], [[1], [EOS]]]), "logprobs": st.integers(0, 5)},
) | st.fixed_dictionaries({"echo": st.just(True)})
SCRIPTS = (
    st.none()
    | st.lists(st.sampled_from(WORDS), max_size=30)
    | st.lists(st.just(ids(f"a{CALL}")), max_size=2).map(lambda calls: [id_ for call in calls for id_ in call])
)


@fuzz
@given(st.sampled_from(sorted(PATHS)), COMMON, CHAT, TEXT, SCRIPTS)
def test_streamed_and_whole_are_the_same(
    running: Served,
    http: httpx.Client,
    path: str,
    common: dict[str, Any],
    chat: dict[str, Any],
    text: dict[str, Any],
    script: list[int] | None,
) -> None:
    running.toy.model.script = script
    body = PATHS[path] | common | (chat if "chat" in path else text)
    whole = http.post(path, json=body)
    if whole.status_code != 200:
        check(whole)
        streamed = http.post(path, json=body | {"stream": True})
        assert (streamed.status_code, streamed.json()) == (whole.status_code, whole.json())
        return
    streamed = http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    items = events(streamed)
    assert items.pop() == "[DONE]"
    items = [item for item in items if isinstance(item, dict)]
    last = items.pop()
    assert (last["choices"], last["usage"]) == ([], whole.json()["usage"])
    assert folded(items) == whole.json()["choices"]
    if body["is_deterministic"]:
        assert {item["id"] for item in items} == {whole.json()["id"]}
