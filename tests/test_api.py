"""The API over a real engine, in processes of their own: one seed, one answer, however it is asked for.

The model is tiny and random: what it says has no meaning, but forced calls of tools have.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch

from tests.backend.tiny_models import save_tiny
from tests.up_process import up_process

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{# A call is <tool_call>, then its name and arguments. #}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]
ASK: dict[str, Any] = {"model": "tiny", "temperature": 0.6, "seed": 42, "max_tokens": 24}
VERIFIED: dict[str, Any] = {"extra_body": {"is_deterministic": True}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, "llama", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with up_process("--model", str(folder)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_one_prompt_alone_and_inside_a_list_of_32(client: openai.OpenAI) -> None:
    prompts = [f"Tell me {n} things" for n in range(32)]
    alone = client.completions.create(prompt=prompts[9], logprobs=5, **ASK, **VERIFIED).choices[0]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Company without a seed and without the guarantee.
        noise = [pool.submit(client.completions.create, model="tiny", prompt=f"{n}", max_tokens=24) for n in range(8)]
        listed = client.completions.create(prompt=prompts, logprobs=5, n=2, **ASK, **VERIFIED).choices
        assert all(future.result().choices for future in noise)
    assert len(listed) == 64
    assert listed[18].model_dump() == alone.model_dump() | {"index": 18}
    assert len({choice.text for choice in listed}) > 32
    assert alone.logprobs is not None and alone.logprobs.tokens is not None
    assert len(alone.logprobs.tokens) in range(1, 25)


def test_one_seed_at_both_endpoints_streamed_and_whole(client: openai.OpenAI, url: str) -> None:
    messages: Any = [{"role": "user", "content": "Say something"}]
    ids = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=5, n=2, **ASK, **VERIFIED)
    text = client.completions.create(prompt=ids, logprobs=5, n=2, **ASK, **VERIFIED)
    assert chat.usage == text.usage
    for one, other in zip(chat.choices, text.choices, strict=True):
        assert one.logprobs is not None and one.logprobs.content is not None and other.logprobs is not None
        assert one.message.content == other.text
        assert [entry.logprob for entry in one.logprobs.content] == other.logprobs.token_logprobs
    found = ["", ""]
    for chunk in client.completions.create(prompt=ids, n=2, stream=True, **ASK, **VERIFIED):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == [choice.text for choice in text.choices]


@pytest.mark.parametrize("verified", [True, False])
def test_forced_calls_keep_to_their_schemas(client: openai.OpenAI, verified: bool) -> None:
    ask: dict[str, Any] = ASK | {
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": TOOLS,
        "max_tokens": 300,
        "extra_body": {"is_deterministic": verified},
    }
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(3):
        choice = client.chat.completions.create(**ask | {"seed": seed}, tool_choice=named).choices[0]
        assert choice.finish_reason == "stop" and choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), CITY)
        one: dict[str, Any] = ask | {"seed": seed, "tool_choice": "required", "parallel_tool_calls": False}
        choice = client.chat.completions.create(**one).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        if verified:
            with client.chat.completions.stream(**one) as stream:
                (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
            assert (streamed.id, streamed.function.name, streamed.function.arguments) == (
                call.id,
                call.function.name,
                call.function.arguments,
            )


def test_a_schema_that_cannot_be_kept_to_is_refused(client: openai.OpenAI) -> None:
    parameters = {"type": "array", "uniqueItems": True}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    named: Any = {"type": "function", "function": {"name": "f"}}
    for choice, param in ((named, "tools[0].function.parameters"), ("required", "tools")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice=choice, **ASK
            )
        assert caught.value.param == param
