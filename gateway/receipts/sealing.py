"""Receipts as bytes for a store that others can reach: as they are, or encrypted with the operator's keys.

A receipt shows its own damage by its signature, so what is kept plain needs no check. Encrypted it is a byte that says
so and what the operator's keys make of it (operator_keys.py). Receipts from before there were keys can still be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.operator_keys import OperatorKeys, Tampered, UnknownKey

ENCRYPTED = b"\x01"
"""No receipt begins so: they begin with a brace."""


class Sealed(Exception):
    """What is kept cannot be read here: it is encrypted under a key that is not set, or damaged."""


class ReceiptSealer:
    """Seals receipts with the operator's keys of 32 bytes; without any they are kept as they are."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = OperatorKeys(keys, b"verbatim receipt") if keys else None

    def __repr__(self) -> str:
        return f"<ReceiptSealer with {self._keys!r}>"

    def seal(self, name: str, raw: bytes) -> bytes:
        """What to keep of the receipt with this name."""
        return raw if self._keys is None else self._keys.encrypt(name.encode(), ENCRYPTED, raw)

    def open(self, name: str, kept: bytes) -> bytes:
        """The receipt; raises `Sealed`."""
        if not kept.startswith(ENCRYPTED):
            return kept
        try:
            if self._keys is None:
                raise UnknownKey
            return self._keys.decrypt(name.encode(), len(ENCRYPTED), kept)
        except UnknownKey as error:
            raise Sealed("it is encrypted under a key that is not set") from error
        except Tampered as error:
            raise Sealed("it is damaged") from error
