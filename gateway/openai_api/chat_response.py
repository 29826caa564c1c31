"""The shape of chat completions and of their chunks.

Owns OpenAI's field names on the way out. Logprobs are written as they came, digit for digit: a float32 widened to a
double survives JSON unharmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.domain import Delta, Finish, Token
from gateway.openai_api.shape import ChoiceShape, Json
from gateway.openai_api.tool_call_deltas import ToolCallDeltas, fold_calls
from gateway.openai_api.tool_choice import ToolUse
from gateway.text.model_text import ModelText
from gateway.text.token_bytes import TokenBytes
from gateway.text.tool_calls import CallReader, Reader, WholeCall
from gateway.text.tool_formats import CALL_LIST, ToolFormat


@dataclass(frozen=True, slots=True)
class ChatView:
    """How a chat request wants its answer shown."""

    logprobs: bool
    tool_use: ToolUse | None = None

    @property
    def key(self) -> list[object]:
        use = self.tool_use
        return ["chat", self.logprobs, None if use is None else [use.names, use.parallel, use.choice]]

    def shape(self, choices: int, text: ModelText, digest: str) -> ChatShape:
        return ChatShape(self, choices, text, digest)


class ChatShape:
    """One answer."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, view: ChatView, choices: int, text: ModelText, digest: str) -> None:
        names = text.token_bytes if view.logprobs else None
        self.choices: list[ChoiceShape] = [
            _ChatChoice(names) if view.tool_use is None else _ToolChoice(names, _calls(view.tool_use, text, digest, n))
            for n in range(choices)
        ]


def _calls(use: ToolUse, text: ModelText, digest: str, choice: int) -> ToolCallDeltas:
    tool_format = text.tool_format
    assert tool_format is not None  # the template refused the tools otherwise
    return ToolCallDeltas(_reader(use, tool_format), use, tool_format.short_ids, digest, choice)


def _reader(use: ToolUse, tool_format: ToolFormat) -> Reader:
    match use.choice:
        case "auto":
            return CallReader(tool_format.syntax, use.names)
        case "required":
            return CallReader(CALL_LIST, use.names)
        case "named":
            return WholeCall(use.names[0])


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
        content = "".join(piece["delta"].get("content") or "" for piece in pieces)
        calls = fold_calls([call for piece in pieces for call in piece["delta"].get("tool_calls", [])])
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        return {
            "message": message,
            "logprobs": None if self._names is None else {"content": entries, "refusal": None},
            "finish_reason": pieces[-1]["finish_reason"],
        }


class _ToolChoice(_ChatChoice):
    """A choice in which the model may call tools."""

    def __init__(self, names: TokenBytes | None, calls: ToolCallDeltas) -> None:
        super().__init__(names)
        self._calls = calls

    def open(self) -> list[Json]:
        return [_piece({"role": "assistant", "content": None, "refusal": None})]

    def push(self, delta: Delta) -> list[Json]:
        deltas = self._calls.push(delta.text)
        if self._names is None:
            return [_piece(made) for made in deltas]
        # Tokens whose text is held back are shown none the less: logprobs never wait.
        first, *rest = deltas or [{}]
        return [_piece(first, _logprobs(delta.tokens, self._names)), *map(_piece, rest)]

    def close(self, finish: Finish) -> list[Json]:
        held = [_piece(delta) for delta in self._calls.finish()]
        return [*held, _piece({}, finish_reason=self._calls.finish_reason(finish))]


def _piece(delta: Json, logprobs: Json | None = None, *, finish_reason: str | None = None) -> Json:
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
