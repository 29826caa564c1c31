"""The shape of chat completions and of their chunks.

Owns OpenAI's field names on the way out. Logprobs are written as they came, digit for digit: a float32 widened to a
double survives JSON unharmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.domain import Delta, Finish, Token
from gateway.openai_api.shape import Json
from gateway.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class ChatView:
    """How a chat request wants its answer shown."""

    logprobs: bool

    def shape(self, choices: int, token_bytes: TokenBytes) -> ChatShape:
        return ChatShape(self, choices, token_bytes)


class ChatShape:
    """One answer."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, view: ChatView, choices: int, token_bytes: TokenBytes) -> None:
        self.key: list[object] = ["chat", view.logprobs]
        self.choices = [_ChatChoice(token_bytes if view.logprobs else None) for _ in range(choices)]


class _ChatChoice:
    """One choice, with logprobs where there are names for the tokens."""

    def __init__(self, names: TokenBytes | None) -> None:
        self._names = names

    def open(self) -> list[Json]:
        return [_piece({"role": "assistant", "content": "", "refusal": None})]

    def push(self, delta: Delta) -> list[Json]:
        if self._names is None:
            return [_piece({"content": delta.text})] if delta.text else []
        return [_piece({"content": delta.text}, _logprobs(delta.tokens, self._names))]

    def close(self, finish: Finish) -> list[Json]:
        return [_piece({}, finish_reason=finish)]

    def fold(self, pieces: Sequence[Any]) -> Json:
        message: Json = {
            "role": "assistant",
            "content": "".join(piece["delta"].get("content", "") for piece in pieces),
            "refusal": None,
        }
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        return {
            "message": message,
            "logprobs": None if self._names is None else {"content": entries, "refusal": None},
            "finish_reason": pieces[-1]["finish_reason"],
        }


def _piece(delta: Json, logprobs: Json | None = None, *, finish_reason: Finish | None = None) -> Json:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: Sequence[Token], names: TokenBytes) -> Json:
    entries = [
        {
            **_scored(names.name(token.id), token.logprob),
            "top_logprobs": [_scored(names.name(top.id), top.logprob) for top in token.top],
        }
        for token in tokens
    ]
    return {"content": entries, "refusal": None}


def _scored(name: bytes, logprob: float) -> Json:
    return {"token": name.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(name)}
