"""The shape of text completions and of their chunks, with logprobs in the legacy format.

Owns OpenAI's field names on the way out. Logprobs are written as they came, digit for digit.

Where OpenAI leaves room: a token whose bytes are no text by themselves is named `bytes:\\xe2\\x98`, as OpenAI did, so
that two of them can stand in one `top_logprobs`. That holds the most likely tokens and the chosen one. `text_offset` is
where a token's text begins; behind a stop string's cut the offsets go on as if nothing had been cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.domain import Delta, Finish, TextPrompt, Token, TokenPrompt
from gateway.openai_api.shape import Json
from gateway.text.model_text import ModelText
from gateway.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class CompletionView:
    """How a request wants its answer shown; `echo` holds the prompts where they are to be shown too."""

    logprobs: bool
    echo: tuple[TextPrompt | TokenPrompt, ...] = ()

    @property
    def key(self) -> list[object]:
        # Token ids to be shown are the jobs' own.
        return [
            "text",
            self.logprobs,
            [prompt.text if isinstance(prompt, TextPrompt) else None for prompt in self.echo],
        ]

    def shape(self, choices: int, text: ModelText, digest: str) -> CompletionShape:
        return CompletionShape(self, choices, text.token_bytes)


class CompletionShape:
    """One answer."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, view: CompletionView, choices: int, token_bytes: TokenBytes) -> None:
        echoes = [_echo(prompt, token_bytes) for prompt in view.echo]
        per_prompt = choices // len(echoes) if echoes else choices
        self.choices = [
            _TextChoice(token_bytes, view.logprobs, echoes[index // per_prompt] if echoes else "")
            for index in range(choices)
        ]


class _TextChoice:
    """One choice. `_offset` is the length of the text that the tokens so far make."""

    def __init__(self, token_bytes: TokenBytes, logprobs: bool, echo: str) -> None:
        self._token_bytes = token_bytes
        self._with_logprobs = logprobs
        self._echo = echo
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def open(self) -> list[Json]:
        return [_piece(self._echo)] if self._echo else []

    def push(self, delta: Delta) -> list[Json]:
        if not self._with_logprobs:
            return [_piece(delta.text)] if delta.text else []
        return [_piece(delta.text, self._logprobs(delta.tokens))]

    def close(self, finish: Finish) -> list[Json]:
        return [_piece("", finish_reason=finish)]

    def fold(self, pieces: Sequence[Any]) -> Json:
        logprobs: dict[str, list[object]] | None = None
        if self._with_logprobs:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for piece in pieces:
                for name, values in (piece["logprobs"] or {}).items():
                    logprobs[name] += values
        text = "".join(piece["text"] for piece in pieces)
        return {"text": text, "logprobs": logprobs, "finish_reason": pieces[-1]["finish_reason"]}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(self._token_bytes.text(token.id)))
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> Json:
        # Of two tokens with one name, the more likely one keeps it.
        top: Json = {}
        for scored in token.top:
            top.setdefault(self._name(scored.id), scored.logprob)
        top.setdefault(self._name(token.id), token.logprob)
        return top

    def _name(self, id_: int) -> str:
        raw = self._token_bytes.name(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _piece(text: str, logprobs: Json | None = None, *, finish_reason: Finish | None = None) -> Json:
    return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _echo(prompt: TextPrompt | TokenPrompt, token_bytes: TokenBytes) -> str:
    match prompt:
        case TextPrompt():
            return prompt.text
        case TokenPrompt():
            return b"".join(map(token_bytes.name, prompt.ids)).decode("utf-8", "replace")
