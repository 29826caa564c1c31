"""The gateway's receipt keys on disk: a folder of PEM files, read at start and again on SIGHUP.

Owns the rule of rotation: of the private keys the one whose file's name comes last signs; all keys are published. So
`new-key`, which begins names with the time, puts its key in use. A key that shall sign no more, and whose receipts
shall still be checked, stays as a file of its public key alone.

Names and not times of change: copies, restores and mounted secrets keep the names.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from gateway.receipts.keys import PublicKey, PublicKeys, SigningKey
from policies.document import Policy
from policies.policy import demands_receipts
from policies.policy_file import Unfit

SUFFIX = ".pem"
MODE = 0o600
OTHERS = 0o077
"""Permission bits that let others at a file."""

log = logging.getLogger(__name__)


class KeyFileError(ValueError):
    """A file cannot be used; the message names it and never repeats what it holds."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The key that signs, None where there is none, and all that are published."""

    signing: SigningKey | None
    public: PublicKeys


NO_KEYS = Keys(None, PublicKeys(()))


def read_keys(path: Path) -> Keys:
    """The keys of a folder, or of one file. Raises `KeyFileError` or `OSError`."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise KeyFileError(f"{path}: holds no key (*{SUFFIX}); `verbatim receipts new-key` makes one")
    signing: SigningKey | None = None
    public: list[PublicKey] = []
    for file in files:
        key = _read(file)
        if isinstance(key, SigningKey):
            signing = key
            public.append(key.public)
        else:
            public.append(key)
    return Keys(signing, PublicKeys(public))


def write_new_key(folder: Path, now: datetime) -> tuple[Path, SigningKey]:
    """Put a new private key into a folder, readable by its owner alone, to sign from now on. Raises `OSError`."""
    private = Ed25519PrivateKey.generate()
    key = SigningKey(private)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{now:%Y%m%dT%H%M%SZ}-{key.public.kid[:8]}{SUFFIX}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path, key


def public_pem(key: PublicKey) -> bytes:
    """What is left of a key that shall sign no more."""
    public = Ed25519PublicKey.from_public_bytes(key.raw)
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class KeyFolder:
    """The keys in force. `failures` counts the reloads that were refused."""

    def __init__(self, path: Path | None) -> None:
        """Reads the keys; none without a path. Raises `KeyFileError` or `OSError`."""
        self._path = path
        self.current = NO_KEYS if path is None else read_keys(path)
        self.failures = 0

    def __repr__(self) -> str:
        return f"<KeyFolder {self._path} {self.current} failures={self.failures}>"

    def check(self, policy: Policy) -> None:
        """Raises `Unfit` for a policy that demands receipts where there is no key to sign them with."""
        setting = demands_receipts(policy)
        if setting is not None and self.current.signing is None:
            raise Unfit(
                f"{setting} asks for receipts, and there is no key to sign them with: make one with `verbatim receipts"
                " new-key FOLDER` and give --receipt-keys FOLDER"
            )

    def reload(self) -> None:
        """Read the keys anew. Where that fails, or none is left to sign with, those before stay in force."""
        if self._path is None:
            return
        try:
            keys = read_keys(self._path)
        except (KeyFileError, OSError) as error:
            self._refuse(str(error))
            return
        if keys.signing is None and self.current.signing is not None:
            self._refuse(f"{self._path}: holds no private key any more")
            return
        self.current = keys

    def _refuse(self, why: str) -> None:
        self.failures += 1
        log.error("receipt keys not taken, those before stay in force: %s", why)


def _read(file: Path) -> SigningKey | PublicKey:
    pem = file.read_bytes()
    try:
        if b"PUBLIC KEY" in pem:
            public = load_pem_public_key(pem)
            if isinstance(public, Ed25519PublicKey):
                return PublicKey.of(public)
        else:
            private = load_pem_private_key(pem, password=None)
            if isinstance(private, Ed25519PrivateKey):
                if file.stat().st_mode & OTHERS:
                    log.warning("the receipt key %s can be read by others: chmod 600", file)
                return SigningKey(private)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise KeyFileError(f"{file}: is no key in PEM, or is locked by a password") from None
    raise KeyFileError(f"{file}: is no Ed25519 key")
