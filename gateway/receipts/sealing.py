"""Receipts as bytes for a store that others can reach: as they are, or encrypted with the operator's keys.

A receipt shows its own damage by its signature, so what is kept plain needs no check. Encrypted it is

    kind (1) | id of a key (4) | nonce (12) | what AES-256-GCM makes of it

under a key that is derived from the operator's and from the receipt's name, as the commit log does it with its own. The
operator's first key encrypts, all of them decrypt. Receipts from before there were keys can still be read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.commit_log.sealing import KEY_BYTES, KEY_ID_BYTES, NONCE_BYTES, key_id

ENCRYPTED = b"\x01"
"""No receipt begins so: they begin with a brace."""


class Sealed(Exception):
    """What is kept cannot be read here: it is encrypted under a key that is not set, or damaged."""


class ReceiptSealer:
    """Seals receipts with the operator's keys of 32 bytes; without any they are kept as they are."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {key_id(key): key for key in keys}
        self._writes = key_id(keys[0]) if keys else None

    def __repr__(self) -> str:
        return f"<ReceiptSealer under {None if self._writes is None else self._writes.hex()}>"

    def seal(self, name: str, raw: bytes) -> bytes:
        """What to keep of the receipt with this name."""
        if self._writes is None:
            return raw
        head, nonce = ENCRYPTED + self._writes, os.urandom(NONCE_BYTES)
        return head + nonce + self._cipher(self._writes, name).encrypt(nonce, raw, head)

    def open(self, name: str, kept: bytes) -> bytes:
        """The receipt; raises `Sealed`."""
        if not kept.startswith(ENCRYPTED):
            return kept
        head, rest = kept[: 1 + KEY_ID_BYTES], kept[1 + KEY_ID_BYTES :]
        if head[1:] not in self._keys:
            raise Sealed("it is encrypted under a key that is not set")
        try:
            return self._cipher(head[1:], name).decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], head)
        except (InvalidTag, ValueError) as error:  # the latter for a nonce that is cut short
            raise Sealed("it is damaged") from error

    def _cipher(self, id_: bytes, name: str) -> AESGCM:
        operators = self._keys[id_]
        derived = hashlib.blake2b(name.encode(), key=operators, digest_size=KEY_BYTES, person=b"verbatim receipt")
        return AESGCM(derived.digest())
