"""The bytes each token id stands for, read once out of a tokenizer's own description.

Bytes, not text, because a token may end in the middle of a UTF-8 character. Knows the two families of decoders in use
by the models served: byte-level BPE (GPT-2's printable alphabet) and SentencePiece pieces with byte fallback. Any other
decoder is refused at start: guessing would corrupt text in silence.

In doubt: SentencePiece decoders strip one leading space of the whole text. `strips_leading_space` says so; for a chat
answer that is the first space of the answer, as Hugging Face's `decode` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import StartError

SPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`of[id]` are the bytes id adds to a text: none for special tokens. `names[id]` spells out special ones too."""

    of: tuple[bytes, ...]
    names: tuple[bytes, ...]
    strips_leading_space: bool

    def text(self, id_: int) -> bytes:
        """What a token adds to a text. Ids beyond the tokenizer's are padding of the embedding: they have none."""
        return self.of[id_] if id_ < len(self.of) else b""

    def texts(self, ids: Sequence[int]) -> bytes:
        """What tokens add to a text, one after the other."""
        try:
            return b"".join([self.of[id_] for id_ in ids])
        except IndexError:
            return b"".join(map(self.text, ids))

    def name(self, id_: int) -> bytes:
        """What a token is called in logprobs: its bytes, special tokens spelled out."""
        return self.names[id_] if id_ < len(self.names) else b""

    def __repr__(self) -> str:
        return f"<TokenBytes {len(self.of)} ids, strips_leading_space={self.strips_leading_space}>"


def read_token_bytes(tokenizer_json: str) -> TokenBytes:
    """The table for a `tokenizer.json`; raises `StartError` where its decoder is of an unknown kind."""
    spec: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    steps = _decoder_steps(spec.get("decoder"))
    byte_level = steps == ["ByteLevel"]
    if not byte_level and not {"ByteFallback", "Fuse"} <= set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise StartError(f"the tokenizer's decoder {steps} is neither ByteLevel nor SentencePiece with byte fallback")
    vocab = _vocabulary(spec["model"])
    added = {token["id"]: token for token in spec.get("added_tokens", [])}
    size = 1 + max([*vocab.values(), *added])
    of = [b""] * size
    names = [b""] * size
    to_bytes = _byte_level_bytes if byte_level else _sentencepiece_bytes
    for piece, id_ in vocab.items():
        of[id_] = names[id_] = to_bytes(piece)
    for id_, token in added.items():
        names[id_] = token["content"].encode()
        of[id_] = b"" if token["special"] else names[id_]
    return TokenBytes(tuple(of), tuple(names), strips_leading_space="Strip" in steps)


def _decoder_steps(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step["type"] for step in decoder["decoders"]]
    return [decoder["type"]]


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # a Unigram model lists [piece, score] in order of ids
        return {piece: id_ for id_, (piece, _score) in enumerate(vocab)}
    return dict(vocab)


def _alphabet() -> dict[str, int]:
    """GPT-2's bijection from characters to bytes: printable ones are themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:
        return piece.encode()  # a piece outside the alphabet stands for itself, as in the tokenizers library


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPIECE_SPACE, " ").encode()
