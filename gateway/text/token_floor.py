"""How few tokens a text can make, told without tokenising it: a prompt that cannot fit is refused for next to nothing.

Why the floor holds. Every character goes into some token, and a token has at least as many bytes as characters. So a
text makes at least one token for as many characters as the longest token has bytes. What could break this is known:

- NFC makes one character out of at most four (the longest canonical decomposition there is).
- Byte-level BPE skips bytes its vocabulary lacks. Of ASCII these are whole characters, which are not counted; in every
  other character there are continuation bytes, which it must have.

Where a tokenizer may lose text in any other way there is no floor: it says 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_NFC_MERGES = 4
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace"}
_SPACE_TO_PIECE = {"type": "Replace", "pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}


@dataclass(frozen=True, slots=True)
class TokenFloor:
    """A token stands for at most `chars_per_token` characters, the `skipped` ones aside; 0 where nothing is known."""

    chars_per_token: int
    skipped: str = ""

    def of(self, text: str) -> int:
        """At least so many tokens come out of `text`."""
        if not self.chars_per_token:
            return 0
        counted = len(text) - sum(map(text.count, self.skipped))
        return -(-counted // self.chars_per_token)


def read_token_floor(tokenizer_json: str, names: Sequence[bytes]) -> TokenFloor:
    """The floor of a `tokenizer.json` whose tokens, special ones spelled out, are `names`."""
    spec: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    known = frozenset(names)
    normalizers = _steps(spec.get("normalizer"), "normalizers")
    pre_tokenizers = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    needed = range(0x80, 0xC0) if byte_level else range(0x100)
    keeps_all = (
        all(map(_normalizer_keeps_all, normalizers))
        and all(map(_pre_tokenizer_keeps_all, pre_tokenizers))
        and all(bytes([byte]) in known for byte in needed)
        and (byte_level or spec["model"].get("byte_fallback") is True)
        # These take the white space beside them, however much, into one token.
        and not any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens", []))
    )
    if not keeps_all:
        return TokenFloor(0)
    merges = _NFC_MERGES if any(step["type"] == "NFC" for step in normalizers) else 1
    skipped = "".join(chr(byte) for byte in range(0x80) if bytes([byte]) not in known)
    return TokenFloor(max(map(len, names)) * merges, skipped)


def _steps(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _normalizer_keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in ("NFC", "Prepend") or step == _SPACE_TO_PIECE


def _pre_tokenizer_keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPS_ALL or (step["type"] == "Split" and step["behavior"] != "Removed")
