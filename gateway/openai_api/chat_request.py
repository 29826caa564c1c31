"""Parses and checks `POST /v1/chat/completions`.

Owns the list of its fields: understood, accepted only at a value that means nothing, and refused. Knows nothing of
models, policies or capacity.

Where OpenAI leaves room: text parts of one message are joined by newlines, as vLLM does. `developer` is `system` to the
model's template.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from backend.protocol import MAX_TOP_LOGPROBS
from gateway.domain import ChatPrompt, Message, Order
from gateway.openai_api.ask import Ask
from gateway.openai_api.body import Unsupported, read_body
from gateway.openai_api.chat_response import ChatView
from gateway.openai_api.generation import GenerationFields, check_generation, facts_of
from gateway.openai_api.sampling import require, sampling_of, stop_ids_of

UNSUPPORTED = Unsupported(
    neutral={
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "service_tier": ("auto", "default"),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
    },
    never=frozenset({"audio", "prediction", "web_search_options", "moderation"}),
)


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], msgspec.Meta(min_length=1)]
    name: str | None = None


class _Body(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


def parse_chat(content: bytes, determinism_header: str | None) -> Ask:
    """Parse a request body; raises `RequestError` naming the field at fault."""
    body = read_body(content, _Body, UNSUPPORTED)
    _check(body)
    order = Order(
        model=body.model,
        prompts=(ChatPrompt(tuple(map(_message, body.messages))),),
        sampling=sampling_of(body),
        facts=facts_of(body, determinism_header),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        stops=body.stops,
        stop_ids=stop_ids_of(body),
        choices=body.n,
        top_logprobs=body.top_logprobs or 0,
        ignore_eos=body.ignore_eos,
    )
    return Ask(order, ChatView(body.logprobs), body.stream, body.include_usage)


def _check(body: _Body) -> None:
    require(len(body.messages) > 0, "messages", "must hold at least one message")
    check_generation(body)
    limit = body.max_completion_tokens
    require(limit is None or limit >= 1, "max_completion_tokens", "must be at least 1")
    both = None not in (body.max_tokens, limit)
    require(not both or body.max_tokens == limit, "max_tokens", "contradicts max_completion_tokens")
    if body.top_logprobs is not None:
        require(body.logprobs, "top_logprobs", "needs logprobs to be true")
        require(0 <= body.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")


def _message(message: _Message) -> Message:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return Message("system" if message.role == "developer" else message.role, text, message.name)
