"""Prompts of every kind as token ids.

Owns the checks of a prompt against the vocabulary and the context. Long texts are worked on in a thread: the tokenizer
gives up the interpreter's lock meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from backend.protocol import Info
from gateway.domain import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from gateway.errors import ContextExceeded, NotAllowed, RequestError
from gateway.text.model_text import ModelText

INLINE_CHARS = 16_384
"""Prompts up to this long are tokenised on the event loop, in under about 10 ms; longer ones in a thread."""

PIECE_CHARS = 64
"""What a message or a prompt weighs beside its own words: an empty one is worked on too."""


class PromptTokens:
    """The encoder of one model."""

    def __init__(self, info: Info, text: ModelText) -> None:
        self._info = info
        self._text = text

    async def encode(
        self, prompts: Sequence[Prompt], *, fitting: bool = True, most: int | None = None
    ) -> list[tuple[int, ...]]:
        """The ids of each prompt.

        Raises `RequestError` naming the field at fault; where they must be `fitting`, also for one of no token and,
        `ContextExceeded`, for one that leaves no room for an answer; `NotAllowed` for more than `most` tokens, which is
        the policy's limit.
        """
        bounds = _Bounds(self._info.max_context if fitting else None, most)
        if sum(map(_weight, prompts)) <= INLINE_CHARS:
            return self._encode(prompts, bounds)
        return await asyncio.to_thread(self._encode, prompts, bounds)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `RequestError` for an id outside the vocabulary."""
        if ids and max(ids) >= self._info.vocab_size:
            raise RequestError(
                f"{field} holds token id {max(ids)}; the vocabulary has {self._info.vocab_size}", param=field
            )

    def _encode(self, prompts: Sequence[Prompt], bounds: _Bounds) -> list[tuple[int, ...]]:
        return [self._ids(prompt, bounds) for prompt in prompts]

    def _ids(self, prompt: Prompt, bounds: _Bounds) -> tuple[int, ...]:
        field = field_of(prompt)
        match prompt:
            case ChatPrompt():
                # The template writes the special tokens itself.
                ids = self._text_ids(self._text.render_chat(prompt), prompt, bounds, special_tokens=False)
            case TextPrompt():
                ids = self._text_ids(prompt.text, prompt, bounds, special_tokens=prompt.special_tokens)
            case TokenPrompt():
                ids = prompt.ids
                self.check_ids(ids, field)
        if not ids and bounds.context is not None:
            raise RequestError(f"{field} must make at least one token", param=field)
        bounds.check(len(ids), prompt)
        return ids

    def _text_ids(self, text: str, prompt: Prompt, bounds: _Bounds, *, special_tokens: bool) -> tuple[int, ...]:
        # Nobody waits for the tokens of a prompt that cannot fit.
        if bounds.any:
            bounds.check(self._text.least_tokens(text), prompt, "at least ")
        return self._text.encode(text, special_tokens=special_tokens)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How long a prompt may be: below the model's `context`, at `most` what the policy allows. None for any length."""

    context: int | None
    most: int | None

    @property
    def any(self) -> bool:
        return self.context is not None or self.most is not None

    def check(self, tokens: int, prompt: Prompt, at_least: str = "") -> None:
        """Raise `ContextExceeded` or `NotAllowed` for too many."""
        said = "the messages make" if isinstance(prompt, ChatPrompt) else "the prompt has"
        if self.context is not None and tokens >= self.context:
            limit = f"this model's maximum context length is {self.context} tokens"
            raise ContextExceeded(f"{limit}, but {said} {at_least}{tokens} tokens", param=field_of(prompt))
        if self.most is not None and tokens > self.most:
            limit = f"a prompt may have at most {self.most} tokens here"
            raise NotAllowed(f"{limit}, but {said} {at_least}{tokens}", param=field_of(prompt))


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
