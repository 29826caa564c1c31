"""Chat prompts in any number, no two with a common beginning of more than a few tokens.

Engines that cache prefixes would otherwise skip work that others do: each prompt starts with a number of its own.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime

from tokenizers import Tokenizer

from backend.protocol import TokenizerFiles
from gateway.domain import ChatPrompt, Message
from gateway.text.chat_template import ChatTemplate

_QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a story about a lighthouse keeper.",
    "How do plants make food from light?",
    "Give me a recipe for a simple soup.",
    "What are the causes of inflation?",
    "Describe a walk through an old city.",
    "Compare trains with planes for short trips.",
    "How does a bicycle stay upright?",
)
_TURN_TOKENS = 6
"""At the end of a prompt: the end of the user's turn and the beginning of the assistant's."""


class Prompts:
    """Prompt number i as token ids, always the same for the same model."""

    def __init__(self, files: TokenizerFiles):
        assert files.chat_template is not None
        self._tokenizer: Tokenizer = Tokenizer.from_str(files.tokenizer_json)
        self._template = ChatTemplate(files.chat_template, files.special_tokens, lambda: datetime.now(UTC))

    def __getitem__(self, number: int) -> list[int]:
        return self._encode(number, _QUESTIONS[number % len(_QUESTIONS)])

    def of_length(self, number: int, length: int) -> list[int]:
        """Prompt number i of exactly so many tokens: questions in an order of its own, cut before the turn's end."""
        order = random.Random(number)
        text, ids = "", list[int]()
        while len(ids) < length:
            text += " ".join(order.choices(_QUESTIONS, k=1 + length // 8)) + " "
            ids = self._encode(number, text)
        return [*ids[: length - _TURN_TOKENS], *ids[-_TURN_TOKENS:]]

    def _encode(self, number: int, question: str) -> list[int]:
        text = self._template.render(
            ChatPrompt(
                (
                    Message("system", f"{number:05d} is the number of this conversation."),
                    Message("user", question),
                )
            )
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
