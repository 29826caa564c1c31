"""`/tokenize` and `/detokenize`, as vLLM and SGLang have them.

A text, a list of texts (SGLang's) or a chat (vLLM's) to ids; ids, or a list of lists of them, to text. Where the two
answer differently, both answers are given: `prompt` is vLLM's text, special tokens spelled out, and `text` SGLang's,
without them unless `skip_special_tokens` is false.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.domain import Prompt, TextPrompt
from gateway.openai_api.body import Rules, read_body, take, take_rest
from gateway.openai_api.chat_prompt import FREE, ChatPromptFields, chat_prompt_of
from gateway.openai_api.sampling import require
from gateway.openai_api.shape import Json
from gateway.text.model_text import ModelText

TOKENIZE_ROUTES = ("/tokenize", "/v1/tokenize")
DETOKENIZE_ROUTES = ("/detokenize", "/v1/detokenize")


class ChatBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    return_token_strs: bool = False


class TextBody(ChatBody, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str]
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Tokenize:
    """A valid request; `model` None means the only one there is."""

    model: str | None
    prompts: tuple[Prompt, ...]
    is_list: bool
    with_names: bool

    def body(self, ids: Sequence[Sequence[int]], text: ModelText, max_context: int) -> Json:
        """The response to it, of the ids of each prompt."""
        names = [[text.token_bytes.name(id_).decode("utf-8", "replace") for id_ in row] for row in ids]
        counts = [len(row) for row in ids]
        body: Json = {
            "count": counts if self.is_list else counts[0],
            "max_model_len": max_context,
            "tokens": ids if self.is_list else ids[0],
        }
        if self.with_names:
            body["token_strs"] = names if self.is_list else names[0]
        return body


@dataclass(frozen=True, slots=True)
class Detokenize:
    """A valid request; `model` None means the only one there is."""

    model: str | None
    rows: tuple[tuple[int, ...], ...]
    is_list: bool
    skip_special_tokens: bool

    def body(self, text: ModelText) -> Json:
        """The response to it."""
        spelled = [text.decode(row, special_tokens=True) for row in self.rows]
        plain = [text.decode(row, special_tokens=False) for row in self.rows] if self.skip_special_tokens else spelled
        return {
            "prompt": spelled if self.is_list else spelled[0],
            "text": plain if self.is_list else plain[0],
        }


def parse_tokenize(content: bytes) -> Tokenize:
    """Parse a request body; raises `RequestError` naming the field at fault."""
    fields = read_body(content, Rules(free=FREE))
    if "messages" in fields:
        chat = chat_prompt_of(take(fields, ChatPromptFields))
        body = take_rest(fields, ChatBody)
        return Tokenize(body.model, (chat,), is_list=False, with_names=body.return_token_strs)
    text = take_rest(fields, TextBody)
    require(text.prompt != [], "prompt", "must not be empty")
    texts = [text.prompt] if isinstance(text.prompt, str) else text.prompt
    prompts = tuple(TextPrompt(one, text.add_special_tokens) for one in texts)
    return Tokenize(text.model, prompts, isinstance(text.prompt, list), text.return_token_strs)


def parse_detokenize(content: bytes) -> Detokenize:
    """Parse a request body; raises `RequestError` naming the field at fault."""
    body = take_rest(read_body(content, Rules()), DetokenizeBody)
    rows = [tuple(item) for item in body.tokens if isinstance(item, list)]
    is_list = bool(rows)
    require(len(rows) in (0, len(body.tokens)), "tokens", "must hold token ids or lists of them, not some of each")
    if not is_list:
        rows = [tuple(item for item in body.tokens if isinstance(item, int))]
    require(all(id_ >= 0 for row in rows for id_ in row), "tokens", "must hold token ids of 0 or more")
    return Detokenize(body.model, tuple(rows), is_list, body.skip_special_tokens)
