"""Bytes that only those can read, and write, who have the operator's keys, for stores that others can reach.

    head | id of a key (4) | nonce (12) | what AES-256-GCM makes of the rest

The head stays plain; with the id it is authenticated too. What encrypts is derived from an operator's key, a purpose
and the name of what is encrypted, so nothing can be passed off as something else. There are few encryptions to a name:
random nonces never meet. The operator's first key encrypts, all of them decrypt, so keys can be changed while gateways
run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES, KEY_ID_BYTES = 32, 4
_NONCE_BYTES = 12


class UnknownKey(Exception):
    """What was encrypted names a key that is not among these."""


class Tampered(Exception):
    """What was encrypted is not what was written, or is not of this name."""


class OperatorKeys:
    """The operator's keys of 32 bytes, for one purpose, of at most 16 bytes."""

    def __init__(self, keys: Sequence[bytes], purpose: bytes) -> None:
        assert keys and all(len(key) == KEY_BYTES for key in keys)
        self._keys = {_key_id(key): key for key in keys}
        self._writes = _key_id(keys[0])
        self._purpose = purpose

    def __repr__(self) -> str:
        return f"<OperatorKeys {self._purpose!r} writes {self._writes.hex()} of {[id_.hex() for id_ in self._keys]}>"

    def encrypt(self, name: bytes, head: bytes, plain: bytes) -> bytes:
        """What to keep of `plain` under a name."""
        head, nonce = head + self._writes, os.urandom(_NONCE_BYTES)
        return head + nonce + self._cipher(self._writes, name).encrypt(nonce, plain, head)

    def decrypt(self, name: bytes, head_bytes: int, kept: bytes) -> bytes:
        """What was encrypted behind a head of so many bytes; raises `UnknownKey` or `Tampered`."""
        behind = head_bytes + KEY_ID_BYTES
        head, nonce, hidden = kept[:behind], kept[behind:][:_NONCE_BYTES], kept[behind + _NONCE_BYTES :]
        if (id_ := head[head_bytes:]) not in self._keys:
            raise UnknownKey
        try:
            return self._cipher(id_, name).decrypt(nonce, hidden, head)
        except (InvalidTag, ValueError) as error:  # the latter for a nonce that is cut short
            raise Tampered from error

    def _cipher(self, id_: bytes, name: bytes) -> AESGCM:
        derived = hashlib.blake2b(name, key=self._keys[id_], digest_size=KEY_BYTES, person=self._purpose)
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


def _key_id(key: bytes) -> bytes:
    """What names one of the operator's keys, and tells nothing of it."""
    return hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"verbatim key id").digest()
