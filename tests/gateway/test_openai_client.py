"""The official client, unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from launched import Gateway
from toy_backend import Status, ToyBackend, on
from toy_model import ids


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_whole_and_streamed_are_the_same(toy: ToyBackend, client: openai.AsyncOpenAI) -> None:
    toy.model.script = ids("Hello, \N{SNOWMAN} world. All is well.")
    ask = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"is_deterministic": True},
    }
    raw = await client.chat.completions.with_raw_response.create(**ask)
    assert raw.headers["x-verbatim-determinism"] == "verified"
    whole = raw.parse()
    assert whole.choices[0].message.content == "Hello, \N{SNOWMAN} world. All is well."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.system_fingerprint == toy.fingerprint
    assert whole.usage is not None

    text, entries, finish, usage = "", [], None, None
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        assert chunk.id == whole.id
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
            finish = choice.finish_reason or finish
    assert (text, finish, usage) == (whole.choices[0].message.content, "stop", whole.usage)
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["toy"]
    assert (await client.models.retrieve("toy")).owned_by == "verbatim"


async def test_errors_are_the_clients_own(toy: ToyBackend, client: openai.AsyncOpenAI) -> None:
    ask = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**ask, max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**{**ask, "model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    toy.faults = on("/v1/verify", Status(429))
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(**ask, extra_body={"is_deterministic": True})
    toy.calls.clear()
    toy.faults = lambda path, nth: Status(500) if path == "/v1/verify" and nth >= 1 else None
    stream = await client.chat.completions.create(**ask, stream=True, extra_body={"is_deterministic": True})
    with pytest.raises(openai.APIError, match="the toy says 500"):
        async for _ in stream:
            pass
