"""What a request may say, and which field is named when it may not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from backend.protocol import MAX_SEED, MIN_SEED, Grammar, Sampling
from gateway.domain import ChatPrompt, Message, Tool, ToolCall
from gateway.errors import RequestError
from gateway.openai_api.ask import Ask
from gateway.openai_api.body import VIEWS
from gateway.openai_api.chat_request import RULES, parse_chat
from gateway.openai_api.chat_response import ChatView
from gateway.openai_api.tool_choice import ToolUse
from policies.policy import RequestFacts

MESSAGES = [{"role": "user", "content": "hi"}]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}
CALLED = "messages[0].tool_calls[0].function"


def called(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


CALL = called('{"a": [1, null]}')


def defining(name: str, definition: object) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def forced(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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
    assert order.facts == RequestFacts(model="m", route="/v1/chat/completions")
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
    sampling = {
        "temperature": 0.0,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    assert order.facts == RequestFacts(False, None, -1, sampling, "m", "/v1/chat/completions")
    assert order.ignore_eos


def test_equal_requests_look_equal() -> None:
    assert parse(temperature=0, top_p=1, min_p=-0.0, top_k=-1) == parse(temperature=-0.0, top_p=1.0, min_p=0, top_k=0)
    assert str(parse(temperature=-0.0)) == str(parse(temperature=0))
    assert parse(logit_bias={"5": -0.0}, stop_token_ids=[], min_tokens=0) == parse()
    zeros = {"presence_penalty": -0.0, "frequency_penalty": -0.0}
    assert str(parse(**zeros)) == str(parse(presence_penalty=0, frequency_penalty=0))
    assert str(parse(**zeros).order.sampling) == str(parse().order.sampling)
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


def test_tools_and_what_became_of_them() -> None:
    ask = parse(
        tools=[TOOL],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [CALL, called("")], "refusal": None},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "4"}]},
        ],
        parallel_tool_calls=False,
    )
    (prompt,) = ask.order.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1:] == (
        Message("assistant", "", None, (ToolCall("call_1", "f", {"a": [1, None]}), ToolCall("call_1", "f", {}))),
        Message("tool", "4", tool_call_id="call_1"),
    )
    # A null in a schema is a value.
    assert prompt.tools == (Tool("f", None, {"type": "object", "default": None}),)
    assert ask.view == ChatView(logprobs=False, tool_use=ToolUse(("f",), parallel=False))
    for choice in (None, "auto"):
        assert parse(tools=[TOOL], tool_choice=choice) == parse(tools=[TOOL], parallel_tool_calls=True)
    assert parse(tools=[TOOL], tool_choice="none") == parse()


def test_a_forced_call_is_a_grammar() -> None:
    x: dict[str, Any] = {"type": "integer"}
    tools = [defining("f", x), defining("g", x), {"type": "function", "function": {"name": "h"}}]
    named = parse(tools=tools, tool_choice=forced("g"))
    assert named.view == ChatView(False, ToolUse(("g",), True, "named"))
    assert named.order.sampling.grammar is not None
    assert json.loads(named.order.sampling.grammar.text) == tools[1]["function"]["parameters"]
    assert named.order.grammar_field == "tools[1].function.parameters"
    bare = parse(tools=tools, tool_choice=forced("h"))
    assert bare.order.sampling.grammar == Grammar("json_schema", '{"type":"object"}')
    for parallel in (True, False):
        required = parse(tools=tools, tool_choice="required", parallel_tool_calls=parallel)
        assert required.view == ChatView(False, ToolUse(("f", "g", "h"), parallel, "required"))
        assert required.order.sampling.grammar is not None
        schema = json.loads(required.order.sampling.grammar.text)
        jsonschema.Draft202012Validator.check_schema(schema)
        good = {"name": "f", "parameters": {"x": 3}}
        for calls, fits in (
            ([good], True),
            ([good, {"name": "h", "parameters": {}}], parallel),
            ([], False),
            ([{"name": "g", "parameters": {"x": "3"}}], False),
            ([{"name": "f"}], False),
            ([{"name": "other", "parameters": {}}], False),
            ([{**good, "more": 1}], False),
        ):
            assert jsonschema.Draft202012Validator(schema).is_valid(calls) == fits
    # The prompt is the same whatever the choice.
    assert named.order.prompts == required.order.prompts


def test_where_the_prompt_ends() -> None:
    said = [*MESSAGES, {"role": "assistant", "content": "x"}]
    for fields, ends in (
        ({}, (True, False)),
        ({"add_generation_prompt": True}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
    ):
        (prompt,) = parse(messages=said, **fields).order.prompts
        assert isinstance(prompt, ChatPrompt)
        assert (prompt.opens_turn, prompt.continues) == ends


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
    ({"messages": [*MESSAGES, {"role": "function", "content": "x", "name": "f"}]}, "messages[1].role"),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "x"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": [called("[]")]}]}, f"{CALLED}.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [called("{")]}]}, f"{CALLED}.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [called('{"a": NaN}')]}]}, f"{CALLED}.arguments"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [called('{"a":' * 65 + "1" + "}" * 65)]}]},
        f"{CALLED}.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [called('{"a":' * 9999)]}]}, f"{CALLED}.arguments"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
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
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
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
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "returns": 1}}]}, "tools[0].function.returns"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": 1}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]}, "tool_choice.type"),
    ({"tool_choice": "required", "tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": "required", "tools": [TOOL], "regex": "a"}, "regex"),
    (
        {"tool_choice": "required", "tools": [defining("f", {"type": "null"}), defining("g", {"type": "string"})]},
        "tools[1].function.parameters.$defs",
    ),
    ({"tool_choice": "required", "tools": [defining("f", "x" * 66_000)]}, "tools"),
    ({"tool_choice": forced("f"), "tools": [defining("f", "x" * 66_000)]}, "tools[0].function.parameters"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": json.loads('{"a":' * 65 + "1" + "}" * 65)}, "chat_template_kwargs"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "continue_final_message": True,
            "add_generation_prompt": True,
            "messages": [*MESSAGES, {"role": "assistant", "content": "x"}],
        },
        "continue_final_message",
    ),
    (
        {"continue_final_message": True, "messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        "continue_final_message",
    ),
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
    ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ({"temprature": 1}, "temprature"),
    ({"": 1}, None),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(fields: dict[str, Any], param: str | None) -> None:
    error = refused(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())
    assert error.status == 400
    assert error.param == param
    assert param is None or param in error.message


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temperature": "1"}, "invalid_type"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_type"),
        ({"tool_choice": "any"}, "invalid_value"),
        ({"temperature": 3}, "invalid_value"),
        ({"n": 0}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({"messages": None}, "missing_required_parameter"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter"),
        ({"temprature": 1}, "unknown_parameter"),
        ({"stream": True, "stream_options": {"speed": 1}}, "unknown_parameter"),
        ({"audio": {"voice": "x"}}, "unsupported_parameter"),
        ({"modalities": ["audio"]}, "unsupported_value"),
    ],
)
def test_the_code_is_openais_word_for_it(fields: dict[str, Any], code: str) -> None:
    assert refused(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()).code == code


def test_a_body_that_has_no_field_has_no_code() -> None:
    for content in (b"[]", b"{", b"[" * 100_000):
        assert refused(content).code is None


@pytest.mark.parametrize("name", RULES.neutral)
def test_unsupported_fields_are_accepted_where_they_change_nothing(name: str) -> None:
    for value in RULES.neutral[name]:
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
@pytest.mark.parametrize("field", ["messages", "stop", "guided_grammar", "tools"])
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
