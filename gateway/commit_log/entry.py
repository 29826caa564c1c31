"""A log's tokens as a shared store keeps them: an entry of bytes for each token.

    check (8) | id (4) | logprob (8) | for each alternative: id (4), logprob (8)

Little-endian; logprobs as doubles, which hold any float32 exactly. Of two entries of one position the shorter must be
the beginning of the longer, behind their checks: the longer one knows more alternatives. The check is a keyed digest
that binds the rest to its log and its position, so an entry that was damaged, moved or put under another key is seen.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from gateway.domain import Scored, Token

CHECK_BYTES = 8
_PAIR = struct.Struct("<Id")


class Damaged(Exception):
    """The entry at `position` is not what was written there."""

    def __init__(self, position: int) -> None:
        super().__init__(f"damaged at {position}")
        self.position = position


def encode(key: bytes, position: int, token: Token) -> bytes:
    """One token as an entry."""
    payload = _PAIR.pack(token.id, token.logprob)
    if token.top:
        payload += b"".join([_PAIR.pack(scored.id, scored.logprob) for scored in token.top])
    return _check(key, position, payload) + payload


def decode(key: bytes, position: int, entry: bytes) -> Token:
    """The token of an entry; raises `Damaged`."""
    payload = entry[CHECK_BYTES:]
    if not payload or len(payload) % _PAIR.size or entry[:CHECK_BYTES] != _check(key, position, payload):
        raise Damaged(position)
    id_, logprob = _PAIR.unpack_from(payload)
    if len(payload) == _PAIR.size:
        return Token(id_, logprob)
    top = tuple([Scored(*pair) for pair in _PAIR.iter_unpack(payload[_PAIR.size :])])
    return Token(id_, logprob, top)


def agree(one: Token, other: Token) -> bool:
    """Whether two tokens of one position can both be true: they differ at most in how many alternatives they name."""
    both = min(len(one.top), len(other.top))
    return one.id == other.id and one.logprob == other.logprob and one.top[:both] == other.top[:both]


def known(tokens: Sequence[Token], top_logprobs: int) -> int:
    """How many of the first tokens name so many alternatives."""
    return next((n for n, token in enumerate(tokens) if len(token.top) < top_logprobs), len(tokens))


def _check(key: bytes, position: int, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=CHECK_BYTES, key=key, salt=struct.pack("<Q", position)).digest()
