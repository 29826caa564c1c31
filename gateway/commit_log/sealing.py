"""Packed tokens as blocks for a store that others can reach: each bound to its log and to its place in it.

    kind (1) | position (4) | tokens (4) | what the kind has

Little-endian. The head is plain, so that a store can count tokens; `PLAIN` goes on with a check (16) and the packed
tokens, `ENCRYPTED` with what the operator's keys make of them (operator_keys.py). The check is a keyed digest over all
the rest. A block that was damaged, moved, or put under another key is seen, whichever kind it is of; who can write to
the store on purpose can forge plain ones. With keys, plain blocks are not believed: anybody may have written them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.commit_log.packing import Unreadable, pack, unpack
from gateway.domain import Token
from gateway.operator_keys import OperatorKeys, Tampered, UnknownKey

HEAD = struct.Struct("<BII")
PLAIN, ENCRYPTED = 1, 2
CHECK_BYTES = 16


class Damaged(Exception):
    """A block is not what was written."""


class Foreign(Exception):
    """A block is of a kind, or under a key, that this gateway does not read; another one may."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens of a log from a position on."""

    position: int
    tokens: Sequence[Token]


class Sealer(Protocol):
    """Makes blocks for a store, and reads them."""

    def seal(self, key: bytes, block: Block) -> bytes:
        """A block of the log with this key."""
        ...

    def open(self, key: bytes, sealed: bytes) -> Block:
        """What was sealed; raises `Damaged` or `Foreign`."""
        ...


class Checked:
    """Blocks that anybody can read, with a check against accidents."""

    def seal(self, key: bytes, block: Block) -> bytes:
        head, packed = _head(PLAIN, block), pack(block.tokens)
        return head + _check(key, head, packed) + packed

    def open(self, key: bytes, sealed: bytes) -> Block:
        kind, position, count = _read_head(sealed)
        if kind == ENCRYPTED:
            raise Foreign("encrypted, and no key is set")
        behind = HEAD.size + CHECK_BYTES
        packed = sealed[behind:]
        if kind != PLAIN or sealed[HEAD.size : behind] != _check(key, sealed[: HEAD.size], packed):
            raise Damaged
        return _block(position, count, packed)


class Encrypted:
    """Blocks that only those can read, and write, who have the operator's keys of 32 bytes. The first one writes."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = OperatorKeys(keys, b"verbatim log")

    def __repr__(self) -> str:
        return f"<Encrypted with {self._keys!r}>"

    def seal(self, key: bytes, block: Block) -> bytes:
        return self._keys.encrypt(key, _head(ENCRYPTED, block), pack(block.tokens))

    def open(self, key: bytes, sealed: bytes) -> Block:
        kind, position, count = _read_head(sealed)
        if kind == PLAIN:
            raise Foreign("not encrypted")
        if kind != ENCRYPTED:
            raise Damaged
        try:
            packed = self._keys.decrypt(key, HEAD.size, sealed)
        except UnknownKey as error:
            raise Foreign("encrypted under a key that is not set") from error
        except Tampered as error:
            raise Damaged from error
        return _block(position, count, packed)


def _head(kind: int, block: Block) -> bytes:
    return HEAD.pack(kind, block.position, len(block.tokens))


def _read_head(sealed: bytes) -> tuple[int, int, int]:
    if len(sealed) < HEAD.size:
        raise Damaged
    kind, position, count = HEAD.unpack_from(sealed)
    return kind, position, count


def _check(key: bytes, head: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(head + packed, digest_size=CHECK_BYTES, key=key).digest()


def _block(position: int, count: int, packed: bytes) -> Block:
    try:
        return Block(position, unpack(packed, count))
    except Unreadable as error:
        raise Damaged from error
