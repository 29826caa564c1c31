"""API keys: how one is made, what the policy file keeps of it, and how a presented key finds its tenant.

A key is `vb_<id>_<secret>`. The file has the id and a salted SHA-256 of the whole key, never the key. The id is no
secret: it finds the one hash to compare with, in a dict, so looking up costs the same however many keys there are. An
id that does not exist is compared with a decoy, and digests are compared in constant time, so that timing tells
nothing of either. The secret has 256 random bits; no slow hash is needed to protect what cannot be guessed, and a slow
one would let strangers burn our CPU.

Nothing here puts a key, a salt or a digest into a message or a repr.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

PREFIX = "vb_"
_ID_BYTES = 8
_SALT_BYTES = 16
_SECRET_BYTES = 32
_KEY = re.compile(r"vb_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_ID = re.compile(r"[0-9a-f]{16}")
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key. `expires_at` is in seconds since 1970; None for never."""

    id: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    expires_at: float | None = None

    @property
    def hash(self) -> str:
        """As it stands in the file."""
        return f"sha256:{self.salt.hex()}:{self.digest.hex()}"

    def admits(self, key: str, now: float) -> bool:
        """Whether `key` is this one and has not expired; takes the same time whatever the key."""
        equal = hmac.compare_digest(_digest(self.salt, key), self.digest)
        return equal and (self.expires_at is None or now < self.expires_at)


class KeyRing:
    """The keys of all tenants."""

    def __init__(self, keys: Iterable[tuple[str, ApiKey]] = ()) -> None:
        self._by_id = {key.id: (tenant, key) for tenant, key in keys}
        self._decoy = new_key()[1]

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._by_id)}>"

    def tenant_of(self, key: str, now: float) -> str | None:
        """The tenant a presented key belongs to; None for a key that is malformed, unknown, wrong or expired."""
        match = _KEY.fullmatch(key)
        tenant, kept = self._by_id.get(match[1] if match else "", (None, self._decoy))
        return tenant if kept.admits(key, now) else None


def new_key() -> tuple[str, ApiKey]:
    """A key to hand out, and what to keep of it."""
    id_ = secrets.token_hex(_ID_BYTES)
    key = f"{PREFIX}{id_}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    salt = secrets.token_bytes(_SALT_BYTES)
    return key, ApiKey(id_, salt, _digest(salt, key))


def parse_id(value: object) -> str:
    """A key's id; raises `ValueError`."""
    if isinstance(value, str) and _ID.fullmatch(value):
        return value
    raise ValueError("must be the id that `verbatim keys new` printed: 16 hexadecimal digits, in quotes")


def parse_hash(value: object) -> tuple[bytes, bytes]:
    """Salt and digest of a key's hash; raises `ValueError`, which does not repeat the value: it may be a key."""
    if isinstance(value, str) and (match := _HASH.fullmatch(value)):
        return bytes.fromhex(match[1]), bytes.fromhex(match[2])
    raise ValueError("must be the hash that `verbatim keys new` printed: sha256:<salt>:<digest>")


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode()).digest()
