"""Packed tokens as blocks for a store that others can reach: each bound to its log and to its place in it.

    kind (1) | position (4) | tokens (4) | what the kind has

Little-endian. The head is plain, so that a store can count tokens; `PLAIN` goes on with a check (16) and the packed
tokens, `ENCRYPTED` with the id of a key (4), a nonce (12) and what AES-256-GCM makes of them. The check is a keyed
digest over all the rest. A block that was damaged, moved, or put under another key is seen, whichever kind it is of;
who can write to the store on purpose can forge plain ones.

Blocks are encrypted with a key that is derived from the operator's and the log's: there are few blocks to a log, so
random nonces never meet. The operator's first key encrypts; all of them decrypt, so keys can be changed while gateways
run. With keys, plain blocks are not believed: anybody may have written them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.commit_log.packing import Unreadable, pack, unpack
from gateway.domain import Token

HEAD = struct.Struct("<BII")
PLAIN, ENCRYPTED = 1, 2
CHECK_BYTES = 16
KEY_BYTES, KEY_ID_BYTES, NONCE_BYTES = 32, 4, 12


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
        assert keys and all(len(key) == KEY_BYTES for key in keys)
        self._keys = {key_id(key): key for key in keys}
        self._writes = key_id(keys[0])

    def __repr__(self) -> str:
        return f"<Encrypted under {self._writes.hex()} of {[id_.hex() for id_ in self._keys]}>"

    def seal(self, key: bytes, block: Block) -> bytes:
        head = _head(ENCRYPTED, block) + self._writes
        nonce = os.urandom(NONCE_BYTES)
        return head + nonce + self._cipher(self._writes, key).encrypt(nonce, pack(block.tokens), head)

    def open(self, key: bytes, sealed: bytes) -> Block:
        kind, position, count = _read_head(sealed)
        if kind == PLAIN:
            raise Foreign("not encrypted")
        if kind != ENCRYPTED:
            raise Damaged
        behind = HEAD.size + KEY_ID_BYTES
        head, nonce, hidden = sealed[:behind], sealed[behind:][:NONCE_BYTES], sealed[behind + NONCE_BYTES :]
        if (key_id := head[HEAD.size :]) not in self._keys:
            raise Foreign("encrypted under a key that is not set")
        try:
            packed = self._cipher(key_id, key).decrypt(nonce, hidden, head)
        except (InvalidTag, ValueError) as error:  # the latter for a nonce that is cut short
            raise Damaged from error
        return _block(position, count, packed)

    def _cipher(self, key_id: bytes, key: bytes) -> AESGCM:
        derived = hashlib.blake2b(key, key=self._keys[key_id], digest_size=KEY_BYTES, person=b"verbatim log")
        return AESGCM(derived.digest())


def read_keys(text: str) -> tuple[bytes, ...]:
    """Keys of 32 bytes out of base64, with commas between them; raises `ValueError`, which tells nothing of them."""
    try:
        keys = tuple(base64.b64decode(word.strip(), validate=True) for word in text.split(","))
    except binascii.Error:
        raise ValueError("must be base64, with commas between keys") from None
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"each key must have {KEY_BYTES} bytes, in base64")
    return keys


def key_id(key: bytes) -> bytes:
    """What names one of the operator's keys, and tells nothing of it."""
    return hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"verbatim key id").digest()


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
