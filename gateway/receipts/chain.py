"""The hash chain over a choice's tokens: each link names all that came before it.

    link 0 = SHA-256 of the prompt's token ids
    link i = SHA-256(link i-1 | position | token id | logprob), positions counted from 0 behind the prompt

Position, ids and logprob are four bytes each, big-endian; the logprob is the float32's own bits, so two logprobs that
print alike and are not equal give different links.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

LOGPROB_BYTES = 4
_LINK = struct.Struct(">II")


def prompt_digest(ids: Sequence[int]) -> bytes:
    """Link 0."""
    return hashlib.sha256(struct.pack(f">{len(ids)}I", *ids)).digest()


def logprob_bits(logprobs: Sequence[float]) -> bytes:
    """Float32 values, each widened to a double, as four bytes each."""
    return struct.pack(f">{len(logprobs)}f", *logprobs)


def last_link(first: bytes, ids: Sequence[int], bits: bytes) -> bytes:
    """The link of the last token; `first` is link 0, `bits` holds the logprobs' four bytes each."""
    assert len(bits) == LOGPROB_BYTES * len(ids)
    link = first
    for position, id_ in enumerate(ids):
        start = LOGPROB_BYTES * position
        link = hashlib.sha256(link + _LINK.pack(position, id_) + bits[start : start + LOGPROB_BYTES]).digest()
    return link
