"""Tools through the real thing: what the model is shown of them, and what becomes of its calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
from answers import error, events, folded
from launched import Gateway, launch_gateway
from tokenizers import AddedToken, Tokenizer, decoders, models
from toy_backend import ToyBackend
from toy_model import EOS, FILES, TOKENIZER, ids
from toy_tools import CALL, TEMPLATE, TIME, WEATHER

from backend.protocol import VerifyRequest


@pytest.fixture
async def gateway(toy: ToyBackend) -> AsyncIterator[Gateway]:
    toy.files = msgspec.structs.replace(FILES, chat_template=TEMPLATE)
    async with launch_gateway(toy.url) as running:
        yield running


async def prompt(toy: ToyBackend, gateway: Gateway, **fields: object) -> str:
    toy.requests.clear()
    response = await gateway.chat(is_deterministic=True, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    (request,) = toy.requests
    assert isinstance(request, VerifyRequest)
    return str(TOKENIZER.decode(request.context, skip_special_tokens=False))


# --- the prompt ------------------------------------------------------------------------------------------------------


async def test_the_template_shows_the_tools(toy: ToyBackend, gateway: Gateway) -> None:
    weather = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "default": null}}}'
    time = '{"type": "function", "function": {"name": "time", "description": "Tells the time."}}'
    plain = "user:hi|assistant:"
    assert await prompt(toy, gateway) == plain
    assert await prompt(toy, gateway, tools=[WEATHER, TIME]) == f"{weather}\n{time}\n{plain}"
    assert await prompt(toy, gateway, tools=[WEATHER], tool_choice="none") == plain
    assert await prompt(toy, gateway, tools=[]) == plain


async def test_the_template_shows_what_became_of_calls(toy: ToyBackend, gateway: Gateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    assert await prompt(toy, gateway, messages=messages) == (
        'user:hi|assistant:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>|'
        "tool:cold for c1|assistant:"
    )


async def test_where_the_prompt_ends(toy: ToyBackend, gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say "}]
    base = "user:hi|assistant:I say "
    assert await prompt(toy, gateway, messages=messages) == base + "|assistant:"
    assert await prompt(toy, gateway, messages=messages, add_generation_prompt=False) == base + "|"
    assert await prompt(toy, gateway, messages=messages, continue_final_message=True) == base


async def test_what_is_continued_keeps_its_first_space(toy: ToyBackend) -> None:
    tokenizer = Tokenizer(models.BPE({"\u2581a": 0, "</s>": 1, "?": 2}, merges=[], unk_token="?", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens(["</s>"])
    toy.files = msgspec.structs.replace(FILES, chat_template=TEMPLATE, tokenizer_json=tokenizer.to_str(), eos_ids=[1])
    toy.model.script = [0, 0, 1]
    async with launch_gateway(toy.url) as gateway:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
        for fields, text in (({}, "a a"), ({"continue_final_message": True}, " a a")):
            body = (await gateway.chat(messages=messages, **fields)).json()
            assert body["choices"][0]["message"]["content"] == text
        assert (await gateway.complete(prompt=[0])).json()["choices"][0]["text"] == " a a"


async def test_the_templates_own_variables(toy: ToyBackend, gateway: Gateway) -> None:
    shown = await prompt(toy, gateway, chat_template_kwargs={"thinking": None})
    assert shown == "user:hi|assistant:think=None"
    for name in ("messages", "tools", "add_generation_prompt", "m", "nothing", "self", "eos_token", ""):
        found = error(await gateway.chat(chat_template_kwargs={name: 1}), 400)
        assert found["param"] == f"chat_template_kwargs.{name}"


async def test_a_message_that_the_template_hides_cannot_be_continued(toy: ToyBackend) -> None:
    toy.files = msgspec.structs.replace(FILES, chat_template="{{ messages[0].content }}")
    async with launch_gateway(toy.url) as gateway:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
        found = error(await gateway.chat(messages=messages, continue_final_message=True), 400)
        assert found["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (FILES.chat_template, {"tools": [WEATHER]}, "tools"),
        (
            FILES.chat_template,
            {"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]},
            "messages[0].role",
        ),
        (
            FILES.chat_template,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
        ("{{ tools }}{{ messages[0].content }}", {"tools": [WEATHER]}, "tools"),
        ("{{ tools }}<tool_call> arguments{{ raise_exception('no') }}", {"tools": [WEATHER]}, "messages"),
    ],
)
async def test_what_the_template_cannot_show_is_refused(
    toy: ToyBackend, template: str, fields: dict[str, Any], param: str
) -> None:
    toy.files = msgspec.structs.replace(FILES, chat_template=template)
    async with launch_gateway(toy.url) as gateway:
        assert error(await gateway.chat(**fields), 400)["param"] == param


# --- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verified", [True, False])
async def test_a_call(toy: ToyBackend, gateway: Gateway, verified: bool) -> None:
    toy.model.script = ids(CALL)
    body = (await gateway.chat(tools=[WEATHER], is_deterministic=verified)).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo \N{SNOWMAN}"}'}
    # Where no call can come, the same text is content.
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = (await gateway.chat(**fields, is_deterministic=verified)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_content_without_a_call(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids("No tools needed. ")
    (choice,) = (await gateway.chat(tools=[WEATHER])).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "No tools needed. ", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_call_cut_short(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids(CALL)
    (choice,) = (await gateway.chat(tools=[WEATHER], max_tokens=len(ids(CALL)) - 22)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'


async def test_one_call_at_a_time(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids(f"Both:\n{CALL}\n{CALL}")
    for parallel, count in ((True, 2), (None, 2), (False, 1)):
        body = (await gateway.chat(tools=[WEATHER], parallel_tool_calls=parallel)).json()
        message = body["choices"][0]["message"]
        assert message["content"] == "Both:"
        assert len({call["id"] for call in message["tool_calls"]}) == count


NAMED = {"type": "function", "function": {"name": "weather"}}


async def test_a_forced_call(toy: ToyBackend, gateway: Gateway) -> None:
    two = '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "time", "parameters": {}}]'
    for choice, script, finish, expected in (
        ("required", two, "tool_calls", [("weather", '{"city": "Oslo"}'), ("time", "{}")]),
        (NAMED, '{"city": "Oslo"}', "stop", [("weather", '{"city": "Oslo"}')]),
        (NAMED, "", "stop", [("weather", "")]),
    ):
        toy.model.script = ids(script)
        ask: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": choice, "is_deterministic": True}
        whole = (await gateway.chat(**ask)).json()["choices"]
        assert (whole[0]["finish_reason"], whole[0]["message"]["content"]) == (finish, None)
        calls = [call["function"] for call in whole[0]["message"]["tool_calls"]]
        assert [(call["name"], call["arguments"]) for call in calls] == expected
        for request in toy.requests[-1:]:
            assert isinstance(request, VerifyRequest) and request.sampling.grammar is not None
        items = [item for item in events(await gateway.chat(**ask, stream=True)) if isinstance(item, dict)]
        assert folded(items) == whole
        cut = (await gateway.chat(**ask, max_tokens=1)).json()["choices"][0]
        assert cut["finish_reason"] == ("length" if script else "stop")


@pytest.mark.parametrize("logprobs", [True, False])
async def test_streamed_and_whole_are_the_same(toy: ToyBackend, gateway: Gateway, logprobs: bool) -> None:
    for text in (CALL, f"Let me see. {CALL}\n{CALL}", "nothing <tool_call", f"{CALL}done", "<tool_call>{]"):
        toy.model.script = ids(text)
        ask: dict[str, Any] = {"tools": [WEATHER], "is_deterministic": True, "logprobs": logprobs}
        whole = (await gateway.chat(**ask)).json()
        items = [item for item in events(await gateway.chat(**ask, stream=True)) if isinstance(item, dict)]
        assert folded(items) == whole["choices"]
        if logprobs:
            assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
        assert {item["id"] for item in items} == {whole["id"]}


async def test_arguments_stream_token_by_token(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids(CALL)
    items = [item for item in events(await gateway.chat(tools=[WEATHER], stream=True)) if isinstance(item, dict)]
    deltas = [item["choices"][0]["delta"] for item in items]
    assert sum("tool_calls" in delta for delta in deltas) > 10


async def test_marks_that_are_special_tokens(toy: ToyBackend) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    mark = tokenizer.token_to_id("[TOOL_CALLS]")
    template = "{{ tools }}{{ messages[0].content }}[TOOL_CALLS]"
    toy.files = msgspec.structs.replace(FILES, chat_template=template, tokenizer_json=tokenizer.to_str())
    toy.model.script = [mark, *ids(' [{"name": "weather", "arguments": {}}]'), EOS]
    toy.vocab_size = tokenizer.get_vocab_size()
    async with launch_gateway(toy.url) as gateway:
        message = (await gateway.chat(tools=[WEATHER])).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": "{}"}
        assert len(call["id"]) == 9 and call["id"].isalnum()
        plain = (await gateway.chat()).json()["choices"][0]["message"]
        assert plain["content"] == ' [{"name": "weather", "arguments": {}}]'


async def test_the_official_client(toy: ToyBackend, gateway: Gateway) -> None:
    toy.model.script = ids(f"Well. {CALL}")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        ask: dict[str, Any] = {"model": "toy", "tools": [WEATHER, TIME], "seed": 1}
        first = await client.chat.completions.create(messages=messages, **ask)
        said = first.choices[0].message
        assert said.tool_calls is not None
        (call,) = said.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Oslo \N{SNOWMAN}"}
        async with client.chat.completions.stream(messages=messages, **ask) as stream:
            final = await stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls or ()
        assert streamed.function.arguments == call.function.arguments
        assert final.choices[0].message.content == said.content == "Well."
        # The message goes back as it came.
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "cold"}]
        toy.model.script = ids("It is cold.")
        second = await client.chat.completions.create(messages=messages, **ask)
        assert second.choices[0].message.content == "It is cold."
