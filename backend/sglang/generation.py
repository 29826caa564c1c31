"""Draft and stream calls as requests to SGLang's own scheduler, batched with all other traffic."""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from backend.protocol import DraftRequest, DraftToken, ScoredToken, StreamRequest, StreamToken
from backend.server.errors import CallError
from backend.sglang.drafting import PARAMETER, Rule

_MARGIN_TOP = 2


@dataclass(frozen=True, slots=True)
class _Generated:
    """A token as SGLang reports it; `top` best first."""

    id: int
    logprob: float
    top: list[ScoredToken]


async def draft(manager: Any, call: DraftRequest, count: int) -> list[DraftToken]:
    """Up to `count` tokens after the call's context. Raises CallError."""
    rule = Rule(call.sampling, call.generated, frozenset(call.stop_ids), as_logits=True)
    request = _request(call.context, count, rule, max(call.top_logits, _MARGIN_TOP), stream=False)
    tokens: list[DraftToken] = []
    async with aclosing(_generate(manager, request)) as parts:
        async for part in parts:
            tokens += [_draft_token(token, call.top_logits) for token in part]
    return tokens


async def stream(manager: Any, call: StreamRequest, count: int) -> AsyncGenerator[list[StreamToken], None]:
    """Up to `count` tokens as they come. Raises CallError."""
    rule = Rule(call.sampling, 0, frozenset(call.stop_ids), as_logits=False)
    request = _request(call.context, count, rule, call.top_logprobs, stream=True)
    async with aclosing(_generate(manager, request)) as parts:
        async for part in parts:
            if part:
                yield [StreamToken(id=token.id, logprob=token.logprob, top=token.top) for token in part]


def _request(context: list[int], count: int, rule: Rule, top: int, *, stream: bool) -> GenerateReqInput:
    return GenerateReqInput(
        input_ids=context,
        sampling_params={
            "max_new_tokens": count,
            "temperature": 0.0,
            "custom_params": {PARAMETER: msgspec.json.encode(rule).decode()},
        },
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=top,
        stream=stream,
    )


async def _generate(manager: Any, request: GenerateReqInput) -> AsyncGenerator[list[_Generated], None]:
    """Run a request; the tokens that each answer adds. Closing it aborts the request."""
    seen = 0
    try:
        async with aclosing(manager.generate_request(request, None)) as answers:
            async for answer in answers:
                meta = answer["meta_info"]
                reason = meta["finish_reason"]
                if reason is not None and reason["type"] == "abort":
                    raise CallError("unavailable", f"SGLang gave the request up: {reason.get('message')}")
                tokens = _tokens(meta, seen)
                seen += len(tokens)
                yield tokens
    except ValueError as error:
        raise CallError("invalid_request", f"SGLang refused the request: {error}") from error


def _tokens(meta: dict[str, Any], seen: int) -> list[_Generated]:
    tops = meta.get("output_top_logprobs") or []
    return [
        _Generated(
            id_, _float32(logprob), [ScoredToken(i, _float32(s)) for s, i, _ in tops[index] or ()] if tops else []
        )
        for index, (logprob, id_, _) in enumerate(meta["output_token_logprobs"][seen:], start=seen)
    ]


def _draft_token(token: _Generated, top: int) -> DraftToken:
    margin = _float32(token.top[0].score - token.top[1].score)
    return DraftToken(id=token.id, logprob=token.logprob, margin=margin, top=token.top[:top])


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
