"""What a request may say, and which field is named when it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend.protocol import MAX_SEED, MIN_SEED, Sampling
from gateway.domain import ChatPrompt, Message
from gateway.errors import RequestError
from gateway.openai_api.ask import Ask
from gateway.openai_api.body import VIEWS
from gateway.openai_api.chat_request import UNSUPPORTED, parse_chat
from gateway.openai_api.chat_response import ChatView
from policies.policy import RequestFacts

MESSAGES = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> Ask:
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), None)


def refused(content: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_chat(content, None)
    return caught.value


def test_defaults_are_openais() -> None:
    chat = parse()
    assert (chat.stream, chat.include_usage, chat.view) == (False, False, ChatView(logprobs=False))
    order = chat.order
    assert order.sampling == Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    assert (order.max_tokens, order.stops, order.choices, order.top_logprobs) == (None, (), 1, 0)
    assert order.facts == RequestFacts(None, None, None)
    assert order.prompts == (ChatPrompt((Message("user", "hi"),)),)
    assert not order.ignore_eos and not order.stop_ids


def test_everything_said() -> None:
    chat = parse(
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        stop=["a", "b"],
        n=2,
        logprobs=True,
        top_logprobs=20,
        is_deterministic=False,
        ignore_eos=True,
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={"50": -100, "7": 3, "9": 0},
        min_tokens=3,
        stop_token_ids=[9, 4, 9],
        user="u",
        metadata={"deep": [{"er": None}]},
        store=True,
    )
    assert (chat.stream, chat.include_usage, chat.view) == (True, True, ChatView(logprobs=True))
    order = chat.order
    assert order.sampling == Sampling(0.0, 0.5, 0, 0.1, 0, -2.0, 0.5, 1.1, ((7, 3.0), (50, -100.0)), 3)
    assert order.stop_ids == (4, 9)
    assert (order.max_tokens, order.stops, order.choices, order.top_logprobs) == (7, ("a", "b"), 2, 20)
    assert order.facts == RequestFacts(False, None, -1)
    assert order.ignore_eos


def test_equal_requests_look_equal() -> None:
    assert parse(temperature=0, top_p=1, min_p=-0.0, top_k=-1) == parse(temperature=-0.0, top_p=1.0, min_p=0, top_k=0)
    assert str(parse(temperature=-0.0)) == str(parse(temperature=0))
    zeros = {"presence_penalty": -0.0, "frequency_penalty": -0.0, "logit_bias": {"5": -0.0}, "stop_token_ids": []}
    assert parse(**zeros, repetition_penalty=1, min_tokens=0) == parse()
    assert str(parse(**zeros)) == str(parse())
    assert parse(logit_bias={"10": 1, "9": 2}) == parse(logit_bias={"9": 2.0, "10": 1.0, "3": 0, "4": None})
    assert parse(stop_token_ids=[5, 3, 5]) == parse(stop_token_ids=[3, 5])
    assert parse(stop="x") == parse(stop=["x"])
    assert parse(stop=[], **dict.fromkeys(("seed", "temperature", "n", "logprobs", "tools", "user"))) == parse()
    assert parse(max_tokens=3) == parse(max_completion_tokens=3) == parse(max_tokens=3, max_completion_tokens=3)


def test_an_order_knows_what_the_client_calls_its_limit() -> None:
    assert parse(max_tokens=3).order.max_tokens_field == "max_tokens"
    assert parse(max_completion_tokens=3).order.max_tokens_field == "max_completion_tokens"


def test_messages() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    returned = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "audio": None}
    chat = parse(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "ann"},
            returned,
            {"role": "user", "content": ""},
        ]
    )
    (prompt,) = chat.order.prompts
    assert prompt == ChatPrompt(
        (
            Message("system", "be brief"),
            Message("user", "one\ntwo", "ann"),
            Message("assistant", "yes"),
            Message("user", ""),
        )
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": [1]}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": MAX_SEED + 1}, "seed"),
    ({"seed": MIN_SEED - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "42"}, "seed"),
    ({"seed": False}, "seed"),
    ({"stop": ["x"] * 12}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": 3}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": "true"}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
    ({"is_deterministic": "true"}, "is_deterministic"),
    ({"is_deterministic": 1}, "is_deterministic"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"repetition_penalty": [1]}, "repetition_penalty"),
    ({"logit_bias": [[50, 1]]}, "logit_bias"),
    ({"logit_bias": {"50": "1"}}, "logit_bias"),
    ({"logit_bias": {"50": True}}, "logit_bias"),
    ({"logit_bias": {"50": 101}}, "logit_bias"),
    ({"logit_bias": {"50": -100.5}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"050": 1}}, "logit_bias"),
    ({"logit_bias": {" 50": 1}}, "logit_bias"),
    ({"logit_bias": {"5_0": 1}}, "logit_bias"),
    ({"logit_bias": {"\N{SUPERSCRIPT TWO}": 1}}, "logit_bias"),
    ({"logit_bias": {"\N{ARABIC-INDIC DIGIT FIVE}": 1}}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(id_): 1 for id_ in range(1025)}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"min_tokens": True}, "min_tokens"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["3"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [3, None]}, "stop_token_ids[1]"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"guided_json": {}}, "guided_json"),
    ({"temprature": 1}, "temprature"),
    ({"": 1}, None),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(fields: dict[str, Any], param: str | None) -> None:
    error = refused(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())
    assert error.status == 400
    assert error.param == param
    assert param is None or param in error.message


@pytest.mark.parametrize("name", UNSUPPORTED.neutral)
def test_unsupported_fields_are_accepted_where_they_change_nothing(name: str) -> None:
    for value in UNSUPPORTED.neutral[name]:
        assert parse(**{name: value}) == parse()
    error = refused(json.dumps({"model": "m", "messages": MESSAGES, name: "other"}).encode())
    assert error.param == name


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_views_change_nothing(name: str) -> None:
    assert parse(**{name: "x"}) == parse()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"model": "m",}',
        b'{"model": "m"} x',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        '{"model": "m"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"user":' * 100_000,
        b'{"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=range(14),
)
def test_malformed(content: bytes) -> None:
    assert refused(content).status == 400


@pytest.mark.parametrize("depth", [5, 9, 100, 480, 700, 900, 20_000])
@pytest.mark.parametrize("field", ["messages", "stop", "guided_json"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused_by_name(depth: int, field: str, opening: str) -> None:
    nested = opening * depth + "1" + {"[": "]"}.get(opening, "}") * depth
    error = refused(f'{{"model": "m", "messages": {json.dumps(MESSAGES)}, "{field}": {nested}}}'.encode())
    # Beyond some depth the JSON library gives up before there are any fields.
    assert (error.param or "").startswith(field) or (depth > 800 and error.param is None)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ('{"temperature": NaN}', "temperature"),
        ('{"stream_options": {"include_usage": NaN}}', "stream_options.include_usage"),
        ('{"stop": ["a", -Infinity]}', "stop[1]"),
        ('{"messages": [{"role": "user", "content": "hi \\ud800"}]}', "messages[0].content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udc00!"}]}]}',
            "messages[0].content[0].text",
        ),
        ('{"user": "\\ud83d"}', "user"),
        ('{"\\ud800": 1}', None),
        ('{"\\ud800": "\\ud800"}', None),
        ('{"metadata": ' + "[" * 20 + "NaN" + "]" * 20 + "}", None),
        ("[NaN]", None),
    ],
)
def test_what_only_python_takes_for_json_is_refused_by_name(content: str, param: str | None) -> None:
    error = refused(content.encode())
    assert (error.status, error.param) == (400, param)
    assert param is None or param in error.message
    error.message.encode()


def test_key_order_makes_no_difference() -> None:
    forward = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"seed":1}'
    backward = b'{"seed":1,"messages":[{"content":"hi","role":"user"}],"model":"m"}'
    assert parse_chat(forward, None) == parse_chat(backward, None)
