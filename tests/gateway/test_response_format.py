"""The spellings of an answer's form: what they come to, how equal ones look, and what is refused under which name."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import Gateway
from toy_backend import Status, ToyBackend, on

from backend.protocol import (
    MAX_GRAMMAR_BYTES,
    ErrorBody,
    ErrorDetail,
    Grammar,
    StreamRequest,
    VerifyRequest,
)
from gateway.domain import Order
from gateway.errors import RequestError
from gateway.openai_api.chat_request import parse_chat
from gateway.openai_api.completion_request import parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {"enum": ["é", 1.0, 2**70]}}, "required": ["b"]}
TEXT = (
    '{"type":"object","properties":{"b":{"const":null},"a":{"enum":["é",1.0,1180591620717411303424]}},"required":["b"]}'
)


def order(**fields: Any) -> Order:
    chat = parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), None).order
    text = parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode(), None).order
    assert (chat.sampling, chat.grammar_field) == (text.sampling, text.grammar_field)
    return chat


def named(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": named(SCHEMA)}, "response_format.json_schema.schema"),
        ({"response_format": named(SCHEMA, strict=True)}, "response_format.json_schema.schema"),
        ({"response_format": named(SCHEMA, strict=None, description=None)}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text"}, "json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA, indent=3)}, "json_schema"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "structured_outputs.json"),
    ],
)
def test_schemas(fields: dict[str, Any], field: str) -> None:
    asked = order(**fields)
    assert asked.sampling.grammar == Grammar("json_schema", TEXT)
    assert asked.grammar_field == field


def test_any_object() -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert order(**fields).sampling.grammar == Grammar("json_schema", '{"type":"object"}')


def test_regular_expressions() -> None:
    for field in ("regex", "guided_regex"):
        asked = order(**{field: r"a\d+"})
        assert (asked.sampling.grammar, asked.grammar_field) == (Grammar("regex", r"a\d+"), field)
    asked = order(structured_outputs={"regex": "x"})
    assert (asked.sampling.grammar, asked.grammar_field) == (Grammar("regex", "x"), "structured_outputs.regex")


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=5))
def test_choices(choices: list[str]) -> None:
    for fields in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        grammar = order(**fields).sampling.grammar
        assert grammar is not None and grammar.kind == "regex"
        # What is escaped means the same to Python.
        assert all(re.fullmatch(grammar.text, choice) for choice in choices)
        assert not re.fullmatch(grammar.text, "".join(choices) + "\N{SNOWMAN}")


def test_no_form_at_all() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "regex": None}):
        assert order(**fields).sampling.grammar is None
    assert order(structured_outputs={}).sampling.grammar is None


def test_the_order_of_keys_is_the_clients() -> None:
    left, right = ({"properties": {"a": True, "b": True}}, {"properties": {"b": True, "a": True}})
    assert order(json_schema=left).sampling != order(json_schema=right).sampling
    assert order(json_schema=left) == order(guided_json=json.dumps(left, indent=1))


DEEP: dict[str, object] = {}
for _ in range(70):
    DEEP = {"items": DEEP}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": named({}, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": named({}, strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": named({}, more=1)}, "response_format.json_schema.more"),
    ({"response_format": named(True)}, "response_format.json_schema.schema"),
    ({"response_format": named(json.dumps(SCHEMA))}, "response_format.json_schema.schema"),
    ({"response_format": named(DEEP)}, "response_format"),
    ({"response_format": named({"x": "y" * MAX_GRAMMAR_BYTES})}, "response_format.json_schema.schema"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "[1]"}, "json_schema"),
    ({"json_schema": '{"minimum": NaN}'}, "json_schema"),
    ({"json_schema": "[" * 100_000}, "json_schema"),
    ({"json_schema": json.dumps(DEEP)}, "json_schema"),
    ({"json_schema": 3}, "json_schema"),
    ({"regex": ""}, "regex"),
    ({"regex": 3}, "regex"),
    ({"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "regex": "x"}, "regex"),
    ({"guided_json": {}, "guided_regex": "x"}, "guided_regex"),
    ({"ebnf": "root ::= x"}, "ebnf"),
    ({"guided_grammar": "x"}, "guided_grammar"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
    ({"regex": "x", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        order(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_tools_and_a_form_exclude_each_other() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "messages": MESSAGES, "tools": tools, "regex": "x"}
    with pytest.raises(RequestError) as caught:
        parse_chat(json.dumps(body).encode(), None)
    assert caught.value.param == "regex"
    parse_chat(json.dumps(body | {"tool_choice": "none"}).encode(), None)


@pytest.mark.parametrize("verified", [True, False])
async def test_the_backend_is_told(gateway: Gateway, toy: ToyBackend, verified: bool) -> None:
    body = {"model": "toy", "messages": MESSAGES, "max_tokens": 4, "guided_json": SCHEMA, "is_deterministic": verified}
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    calls = [call for call in toy.requests if isinstance(call, VerifyRequest | StreamRequest)]
    assert calls and all(call.sampling.grammar == Grammar("json_schema", TEXT) for call in calls)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("verified", "path"), [(True, "/v1/verify"), (False, "/v1/stream")])
async def test_what_the_backend_refuses_is_said_of_the_clients_field(
    gateway: Gateway, toy: ToyBackend, verified: bool, path: str, stream: bool
) -> None:
    detail = ErrorDetail("invalid_request", 'sampling.grammar: Unimplemented keys: ["not"]', "sampling.grammar")
    toy.faults = on(path, Status(400, msgspec.json.encode(ErrorBody(detail))))
    body = {"model": "toy", "messages": MESSAGES, "is_deterministic": verified, "stream": stream}
    answer = await gateway.http.post("/v1/chat/completions", json=body | {"response_format": named({"not": {}})})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert error["type"] == "invalid_request_error"
    assert error["message"] == 'response_format.json_schema.schema: Unimplemented keys: ["not"]'
    toy.faults = on(path, Status(400, msgspec.json.encode(ErrorBody(ErrorDetail("invalid_request", "no", "context")))))
    answer = await gateway.http.post("/v1/chat/completions", json=body | {"regex": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
