"""The model's text side in one value: messages to token ids, token ids to text.

Built once from what the backend serves, then read-only. Owns no state of any request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from tokenizers import Tokenizer

from backend.protocol import TokenizerFiles
from gateway.domain import ChatPrompt
from gateway.errors import RequestError, StartError
from gateway.text.chat_template import ChatTemplate
from gateway.text.output_text import OutputText
from gateway.text.token_bytes import TokenBytes, read_token_bytes
from gateway.text.token_floor import TokenFloor, read_token_floor
from gateway.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class ModelText:
    """Template, tokenizer and byte table of one model."""

    template: ChatTemplate | None
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    token_floor: TokenFloor
    eos_ids: tuple[int, ...]

    def render_chat(self, chat: ChatPrompt) -> str:
        """The prompt of a chat, as text."""
        if self.template is None:
            raise RequestError("the model has no chat template", param="messages")
        return self.template.render(chat)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools, where it does."""
        return None if self.template is None else self.template.tool_format

    def least_tokens(self, text: str) -> int:
        """What `encode` makes is at least so long; costs next to nothing to know."""
        return self.token_floor.of(text)

    def encode(self, text: str, *, special_tokens: bool) -> tuple[int, ...]:
        """A text as token ids, between those the tokenizer puts around any text where `special_tokens` says so.

        Safe to call in a thread, and there it holds up no other.
        """
        # `encode` would hold the interpreter's lock for seconds where the text is long; the batch calls give it up.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int], *, special_tokens: bool) -> str:
        """Token ids as a text, with special tokens spelled out or left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special_tokens))

    def output(self, stops: Sequence[str], *, continues: bool, spelled: Collection[str], joins: bool) -> OutputText:
        """The text of a new answer, which may go on with another text and spell out some special tokens."""
        return OutputText(self.token_bytes, stops, continues=continues, spelled=spelled, joins=joins)


def load_text(files: TokenizerFiles, now: Callable[[], datetime]) -> ModelText:
    """Build from the backend's files; raises `StartError` where they cannot be used."""
    try:
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise StartError(f"the backend's tokenizer cannot be read: {error}") from error
    # A file may carry both from training; they would change prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    token_bytes = read_token_bytes(files.tokenizer_json)
    token_floor = read_token_floor(files.tokenizer_json, token_bytes.names)
    template = None if files.chat_template is None else ChatTemplate(files.chat_template, files.special_tokens, now)
    return ModelText(template, tokenizer, token_bytes, token_floor, tuple(files.eos_ids))
