"""Committed tokens in, deltas of text out: whole characters only, nothing of a stop string, tokens beside their text.

Owns the order of two filters: bytes to characters, then stop strings. The deltas are a function of the token sequence
alone: how tokens are grouped into commits makes no difference to them. Where nobody will see where one delta ends and
the next one begins, they may be joined, which costs a tenth.

A character that is still incomplete when the tokens end is dropped (its bytes are in the logprobs): so the text at a
smaller `max_tokens` is always a beginning of the text at a larger one. Bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from gateway.domain import Delta, Token
from gateway.text.stop_strings import StopStrings
from gateway.text.token_bytes import TokenBytes


class OutputText:
    """The text of one choice. With `joins` a push may give one delta instead of many.

    One that `continues` another text keeps a leading space whatever the tokenizer does. Special tokens have no text but
    the `spelled` ones.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: Sequence[str],
        *,
        continues: bool = False,
        spelled: Collection[str] = (),
        joins: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._spelled = frozenset(text.encode() for text in spelled)
        self._strip_space = token_bytes.strips_leading_space and not continues
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stops)
        self._joins = joins and not stops and not spelled
        self._waiting: list[Token] = []
        self.consumed = 0
        self.stopped = False

    def __repr__(self) -> str:
        return f"<OutputText consumed={self.consumed} waiting={len(self._waiting)} {self._stops!r}>"

    def push(self, tokens: Sequence[Token]) -> tuple[Delta, ...]:
        """Deltas that may be shown now. Tokens behind the one that completes a stop string are not consumed."""
        if self._joins:
            return self._push_joined(tokens)
        deltas = []
        for token in tokens:
            if self.stopped:
                break
            self.consumed += 1
            self._waiting.append(token)
            text, self.stopped = self._stops.push(self._characters.decode(self._text_bytes(token.id)))
            if text:
                deltas.append(self._release(text))
        return tuple(deltas)

    def finish(self) -> tuple[Delta, ...]:
        """What was held back, and the tokens that made no text. Call once, after the last push."""
        text = "" if self.stopped else self._stops.flush()
        return (self._release(text),) if text or self._waiting else ()

    def _push_joined(self, tokens: Sequence[Token]) -> tuple[Delta, ...]:
        self.consumed += len(tokens)
        self._waiting += tokens
        raw = self._token_bytes.texts([token.id for token in tokens])
        text = self._characters.decode(self._without_first_space(raw))
        return (self._release(text),) if text else ()

    def _text_bytes(self, id_: int) -> bytes:
        raw = self._token_bytes.text(id_)
        if self._spelled and not raw and (name := self._token_bytes.name(id_)) in self._spelled:
            raw = name
        return self._without_first_space(raw)

    def _without_first_space(self, raw: bytes) -> bytes:
        if self._strip_space and raw:
            self._strip_space = False
            return raw.removeprefix(b" ")
        return raw

    def _release(self, text: str) -> Delta:
        delta = Delta(text, tuple(self._waiting))
        self._waiting.clear()
        return delta
