"""Structured output as a client sees it: `verbatim up` on the real model, in processes of their own."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.up_process import up_process

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "mood": {"enum": ["happy", "sad", None]},
    },
    "required": ["name", "age", "hobbies", "mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Tell me about a person. Answer in JSON."}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        up_process() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


def ask(client: openai.OpenAI, verified: bool, *, stream: bool = False, **fields: Any) -> tuple[str, str, list[float]]:
    """Text, finish reason and logprobs."""
    extra = {"is_deterministic": verified} | fields.pop("extra_body", {})
    model = "smollm2-135m-instruct"
    options = {"model": model, "messages": MESSAGES, "logprobs": True, "max_tokens": 150} | fields
    if not stream:
        choice = client.chat.completions.create(**options, extra_body=extra).choices[0]
        assert choice.logprobs is not None
        scores = [entry.logprob for entry in choice.logprobs.content or []]
        return choice.message.content or "", choice.finish_reason, scores
    text, finish, scores = "", "", []
    for chunk in client.chat.completions.create(**options, extra_body=extra, stream=True):
        for part in chunk.choices:
            text += part.delta.content or ""
            finish = part.finish_reason or finish
            scores += [entry.logprob for entry in (part.logprobs.content or [] if part.logprobs else [])]
    return text, finish, scores


@pytest.mark.slow
@pytest.mark.parametrize("verified", [True, False])
def test_schemas_are_kept_to(client: openai.OpenAI, verified: bool) -> None:
    for seed, temperature, stream in ((1, 0.0, False), (2, 1.0, True), (3, 1.0, False)):
        answer = ask(client, verified, stream=stream, seed=seed, temperature=temperature, response_format=FORMAT)
        assert answer[1] == "stop"
        jsonschema.validate(json.loads(answer[0]), SCHEMA)
        if verified:
            # Alone and in company, whole and streamed.
            with concurrent.futures.ThreadPoolExecutor() as pool:
                asking = [
                    pool.submit(
                        ask, client, True, stream=odd, seed=seed, temperature=temperature, response_format=FORMAT
                    )
                    for odd in (True, False, True)
                ]
                noise = pool.submit(ask, client, False, response_format={"type": "json_object"})
                assert all(future.result() == answer for future in asking)
                noise.result()


@pytest.mark.slow
@pytest.mark.parametrize("verified", [True, False])
def test_other_forms_are_kept_to(client: openai.OpenAI, verified: bool) -> None:
    text, finish, _ = ask(client, verified, response_format={"type": "json_object"}, temperature=1.0, seed=4)
    assert text.startswith("{")
    if finish == "stop":
        assert isinstance(json.loads(text), dict)
    pattern = r"[A-Z][a-z]{2,9} is \d{1,2} years old\."
    text, finish, _ = ask(client, verified, temperature=1.0, extra_body={"regex": pattern})
    assert finish == "stop" and re.fullmatch(pattern, text)
    text, finish, _ = ask(client, verified, temperature=1.0, extra_body={"guided_choice": ["yes (it is)", "no"]})
    assert finish == "stop" and text in ("yes (it is)", "no")
    text, finish, scores = ask(client, verified, max_tokens=5, response_format=FORMAT)
    assert finish == "length" and text.startswith("{") and len(scores) == 5


@pytest.mark.slow
def test_what_cannot_be_kept_to_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for verified in (True, False):
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, verified, stream=stream, response_format=form)
            assert caught.value.param == "response_format.json_schema.schema"
            assert "uniqueItems" in str(caught.value)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, verified, extra_body={"regex": "("})
        assert caught.value.param == "regex" and "unclosed group" in str(caught.value)
