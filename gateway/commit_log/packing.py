"""A log's tokens as bytes, column by column: many tokens cost little more to read than one.

    flags (1) | ids | logprobs | where tokens have alternatives: how many each (1), their ids, their logprobs

Little-endian. Ids take 2 bytes, or 4 where one does not fit; logprobs are float32, or doubles where one is no float32.
What is read is what was written, to the last bit. How many tokens there are is said elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from gateway.domain import Scored, Token

WIDE_IDS, DOUBLES, ALTERNATIVES = 1, 2, 4


class Unreadable(ValueError):
    """Bytes that no tokens are packed as."""


def pack(tokens: Sequence[Token]) -> bytes:
    """Tokens as bytes."""
    ids = [token.id for token in tokens]
    logprobs = [token.logprob for token in tokens]
    tops = [token.top for token in tokens]
    others = list(chain.from_iterable(tops))
    other_ids = [scored.id for scored in others]
    other_logprobs = [scored.logprob for scored in others]
    flags = ALTERNATIVES if others else 0
    if max(max(ids), max(other_ids, default=0)) > 0xFFFF:
        flags |= WIDE_IDS
    if not (_are_float32(logprobs) and _are_float32(other_logprobs)):
        flags |= DOUBLES
    id_, logprob = _kinds(flags)
    columns = [bytes([flags]), _column(id_, ids), _column(logprob, logprobs)]
    if others:
        columns += [bytes(map(len, tops)), _column(id_, other_ids), _column(logprob, other_logprobs)]
    return b"".join(columns)


def unpack(packed: bytes, count: int) -> list[Token]:
    """So many tokens; raises `Unreadable`."""
    try:
        flags = packed[0]
        id_, logprob = _kinds(flags)
        columns = f"<x{count}{id_}{count}{logprob}"
        if not flags & ALTERNATIVES:
            values = struct.unpack(columns, packed)
            return list(map(Token, values[:count], values[count:]))
        counts = packed[struct.calcsize(columns) :][:count]
        total = sum(counts)
        values = struct.unpack(f"{columns}{count}B{total}{id_}{total}{logprob}", packed)
    except (IndexError, struct.error) as error:
        raise Unreadable("not packed tokens") from error
    others = iter(map(Scored, values[3 * count : 3 * count + total], values[3 * count + total :]))
    tops = [tuple([next(others) for _ in range(many)]) for many in counts]
    return list(map(Token, values[:count], values[count : 2 * count], tops))


def agree(one: Token, other: Token) -> bool:
    """Whether two tokens of one position can both be true: they differ at most in how many alternatives they name."""
    both = min(len(one.top), len(other.top))
    return one.id == other.id and one.logprob == other.logprob and one.top[:both] == other.top[:both]


def richer(one: Token, other: Token) -> Token:
    """Of two that agree the one that names more alternatives; the first where both name as many."""
    return other if len(other.top) > len(one.top) else one


def known(tokens: Sequence[Token], top_logprobs: int) -> int:
    """How many of the first tokens name so many alternatives."""
    if top_logprobs == 0:
        return len(tokens)
    return next((n for n, token in enumerate(tokens) if len(token.top) < top_logprobs), len(tokens))


def _kinds(flags: int) -> tuple[str, str]:
    return "I" if flags & WIDE_IDS else "H", "d" if flags & DOUBLES else "f"


def _column(kind: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


def _are_float32(values: list[float]) -> bool:
    try:
        return list(struct.unpack(f"<{len(values)}f", _column("f", values))) == values
    except OverflowError:
        return False
