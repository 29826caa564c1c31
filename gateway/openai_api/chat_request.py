"""Parses and checks `POST /v1/chat/completions`.

Owns the list of its fields: understood, accepted only at a value that means nothing, and refused. Knows nothing of
models, policies or capacity.
"""

from __future__ import annotations

from backend.protocol import MAX_TOP_LOGPROBS
from gateway.domain import Order
from gateway.openai_api import chat_prompt, response_format
from gateway.openai_api.ask import Ask
from gateway.openai_api.body import Rules, read_body, take, take_rest
from gateway.openai_api.chat_prompt import ChatPromptFields, chat_prompt_of
from gateway.openai_api.chat_response import ChatView
from gateway.openai_api.generation import ENGINES_OWN, GenerationFields, check_format, check_generation, facts_of
from gateway.openai_api.response_format import FormatFields, format_of
from gateway.openai_api.sampling import require, sampling_of, stop_ids_of
from gateway.openai_api.tool_choice import ToolChoiceFields, tool_plan_of

ROUTE = "/v1/chat/completions"

RULES = Rules(
    neutral={
        **ENGINES_OWN,
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "service_tier": ("auto", "default"),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
    },
    refused=frozenset({"audio", "prediction", "web_search_options", "moderation"}),
    free=chat_prompt.FREE | response_format.FREE,
)


class ChatFields(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


PARTS = (ChatPromptFields, ToolChoiceFields, FormatFields, ChatFields)
"""What a body is made of."""


def parse_chat(content: bytes, determinism_header: str | None) -> Ask:
    """Parse a request body; raises `RequestError` naming the field at fault."""
    fields = read_body(content, RULES)
    prompt = take(fields, ChatPromptFields)
    tools = tool_plan_of(take(fields, ToolChoiceFields), prompt, chat_prompt_of(prompt))
    form = format_of(take(fields, FormatFields))
    require(form.grammar is None or tools.use is None, form.field, "is not supported together with tools")
    form = tools.form or form
    body = take_rest(fields, ChatFields)
    _check(body)
    check_format(form, body)
    order = Order(
        model=body.model,
        prompts=(tools.chat,),
        sampling=sampling_of(body, form.grammar),
        facts=facts_of(body, determinism_header, ROUTE),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        stops=body.stops,
        stop_ids=stop_ids_of(body),
        choices=body.n,
        top_logprobs=body.top_logprobs or 0,
        ignore_eos=body.ignore_eos,
        grammar_field=form.field,
    )
    return Ask(order, ChatView(body.logprobs, tools.use), body.stream, body.include_usage)


def _check(body: ChatFields) -> None:
    check_generation(body)
    limit = body.max_completion_tokens
    require(limit is None or limit >= 1, "max_completion_tokens", "must be at least 1")
    both = None not in (body.max_tokens, limit)
    require(not both or body.max_tokens == limit, "max_tokens", "contradicts max_completion_tokens")
    if body.top_logprobs is not None:
        require(body.logprobs, "top_logprobs", "needs logprobs to be true")
        require(0 <= body.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")
