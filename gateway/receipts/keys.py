"""The keys that receipts are signed and checked with: Ed25519 (RFC 8032), published as a JSON Web Key Set.

A key is named by its thumbprint (RFC 7638, for such keys RFC 8037), which anybody can compute from the key: a name in a
key set that is another one's is not believed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gateway.receipts.receipt import Receipt, ReceiptError, Signature, Statement, encode, parse

WELL_KNOWN = "/.well-known/verbatim-receipts.json"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """What signatures are checked with. `kid` is its thumbprint."""

    kid: str
    raw: bytes

    @classmethod
    def of(cls, key: Ed25519PublicKey) -> PublicKey:
        return cls.of_raw(key.public_bytes_raw())

    @classmethod
    def of_raw(cls, raw: bytes) -> PublicKey:
        members = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": _text(raw)}, separators=(",", ":"))
        return cls(_text(hashlib.sha256(members.encode()).digest()), raw)

    def jwk(self) -> dict[str, str]:
        return {"alg": "EdDSA", "crv": "Ed25519", "kid": self.kid, "kty": "OKP", "use": "sig", "x": _text(self.raw)}


class SigningKey:
    """What signatures are made with."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = PublicKey.of(private.public_key())

    def __repr__(self) -> str:
        return f"<SigningKey {self.public.kid}>"

    def sign(self, statement: Statement) -> Receipt:
        """The statement with its signature."""
        return Receipt(statement, Signature(self.public.kid, self._private.sign(encode(statement)).hex()))


class PublicKeys:
    """All keys that receipts may have been signed with, those no longer in use too."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self._keys = {key.kid: key for key in keys}

    def __repr__(self) -> str:
        return f"<PublicKeys {list(self._keys)}>"

    @property
    def kids(self) -> Sequence[str]:
        return tuple(self._keys)

    def jwks(self) -> dict[str, object]:
        """As a JSON Web Key Set (RFC 7517)."""
        return {"keys": [key.jwk() for key in self._keys.values()]}

    def check(self, raw: bytes) -> Receipt:
        """The receipt in a file's bytes, if it holds in every respect; raises `ReceiptError`."""
        receipt = parse(raw)
        key = self._keys.get(receipt.signature.kid)
        if key is None:
            raise ReceiptError(f"it is signed with the key {receipt.signature.kid!r}, which is not among those given")
        try:
            signature = bytes.fromhex(receipt.signature.value)
            Ed25519PublicKey.from_public_bytes(key.raw).verify(signature, encode(receipt.statement))
        except InvalidSignature as error:
            raise ReceiptError(f"the signature is not the key's, {key.kid}") from error
        return receipt


def read_jwks(text: str | bytes) -> PublicKeys:
    """The Ed25519 keys of a key set; others are left out. Raises `ValueError` for what is no key set."""
    document = json.loads(text)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("not a JSON Web Key Set")
    raws = [
        _raw(key["x"])
        for key in listed
        if isinstance(key, dict) and (key.get("kty"), key.get("crv")) == ("OKP", "Ed25519") and "x" in key
    ]
    return PublicKeys(map(PublicKey.of_raw, raws))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _raw(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("a key's x is not text")
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(raw) != 32:
        raise ValueError("a key's x is not 32 bytes")
    return raw
