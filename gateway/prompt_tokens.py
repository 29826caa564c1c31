"""Prompts of every kind as token ids.

Owns the checks of a prompt against the vocabulary and the context. Long texts are worked on in a thread: the tokenizer
gives up the interpreter's lock meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from backend.protocol import Info
from gateway.domain import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from gateway.errors import ContextExceeded, RequestError
from gateway.text import ModelText

INLINE_CHARS = 16_384
"""Prompts up to this long are tokenised on the event loop, in under about 10 ms; longer ones in a thread."""

PIECE_CHARS = 64
"""What a message or a prompt weighs beside its own words: an empty one is worked on too."""


class PromptTokens:
    """The encoder of one model."""

    def __init__(self, info: Info, text: ModelText) -> None:
        self._info = info
        self._text = text

    async def encode(self, prompts: Sequence[Prompt], *, fitting: bool = True) -> list[tuple[int, ...]]:
        """The ids of each prompt, at least one.

        Raises `RequestError` naming the field at fault, and where they must be `fitting`, `ContextExceeded` for prompts
        that leave no room for an answer.
        """
        if sum(map(_weight, prompts)) <= INLINE_CHARS:
            return self._encode(prompts, fitting)
        return await asyncio.to_thread(self._encode, prompts, fitting)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `RequestError` for an id outside the vocabulary."""
        if ids and max(ids) >= self._info.vocab_size:
            raise RequestError(
                f"{field} holds token id {max(ids)}; the vocabulary has {self._info.vocab_size}", param=field
            )

    def _encode(self, prompts: Sequence[Prompt], fitting: bool) -> list[tuple[int, ...]]:
        limit = self._info.max_context if fitting else None
        return [self._ids(prompt, limit) for prompt in prompts]

    def _ids(self, prompt: Prompt, limit: int | None) -> tuple[int, ...]:
        field = field_of(prompt)
        match prompt:
            case ChatPrompt():
                # The template writes the special tokens itself.
                ids = self._text_ids(self._text.render_chat(prompt), prompt, limit, special_tokens=False)
            case TextPrompt():
                ids = self._text_ids(prompt.text, prompt, limit, special_tokens=prompt.special_tokens)
            case TokenPrompt():
                ids = prompt.ids
                self.check_ids(ids, field)
        if not ids:
            raise RequestError(f"{field} must make at least one token", param=field)
        if limit is not None and len(ids) >= limit:
            raise self._too_long(prompt, str(len(ids)))
        return ids

    def _text_ids(self, text: str, prompt: Prompt, limit: int | None, *, special_tokens: bool) -> tuple[int, ...]:
        # Nobody waits for the tokens of a prompt that cannot fit.
        if limit is not None and (least := self._text.least_tokens(text)) >= limit:
            raise self._too_long(prompt, f"at least {least}")
        return self._text.encode(text, special_tokens=special_tokens)

    def _too_long(self, prompt: Prompt, tokens: str) -> ContextExceeded:
        said = "the messages make" if isinstance(prompt, ChatPrompt) else "the prompt has"
        return ContextExceeded(
            f"this model's maximum context length is {self._info.max_context} tokens, but {said} {tokens} tokens",
            param=field_of(prompt),
        )


def field_of(prompt: Prompt) -> str:
    """What the client calls a prompt of this kind."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _weight(prompt: Prompt) -> int:
    match prompt:
        case ChatPrompt():
            tools = len(msgspec.json.encode(prompt.tools)) if prompt.tools else 0
            return tools + sum(map(_message_weight, prompt.messages))
        case TextPrompt():
            return PIECE_CHARS + len(prompt.text)
        case TokenPrompt():
            return 0


def _message_weight(message: Message) -> int:
    calls = sum(len(msgspec.json.encode(call.arguments)) for call in message.tool_calls)
    return PIECE_CHARS + len(message.content) + len(message.name or "") + calls
