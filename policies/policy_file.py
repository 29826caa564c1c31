"""A policy file on disk: read once at start, and read again when it changes.

Owns the policy in force and the rule of its change: a whole new policy or none. A file that is wrong, or gone, leaves
the policy before it in force; it is logged and counted. Whoever serves a request takes `current` once and keeps it to
the request's end.

A change is taken once the file has looked the same twice in a row, so that a file is not read while an editor writes
it; SIGHUP, which the gateway turns into `ask`, asks for it at once. Replacing the file by renaming another onto it
is safe at any time. The text of a mistake may be logged: it holds no secret (strict_yaml.py, credentials.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from policies.document import Policy
from policies.loader import load_policy
from policies.sections import FileMistakes, Mistake

POLL_S = 0.5
MAX_BYTES = 16 * 1024 * 1024

Look: TypeAlias = tuple[int, int, int]
Looks: TypeAlias = tuple[Look | None, Look | None]
"""What the policy's file and its key set's look like from outside; None where there is none."""

log = logging.getLogger(__name__)


def read_policy(path: Path) -> Policy:
    """The policy in a file, with the keys of its `jwks_file`; raises `FileMistakes` or `OSError`."""
    policy = load_policy(_text(path), str(path))
    if policy.jwt is None or policy.jwt.jwks_file is None:
        return policy
    jwks_path = path.parent / policy.jwt.jwks_file
    jwks = _text(jwks_path)
    _check_jwks(jwks, str(jwks_path))
    return replace(policy, jwt=replace(policy.jwt, jwks_file=str(jwks_path), jwks=jwks))


class Unfit(ValueError):
    """A policy is right in itself and asks for what whoever would obey it does not have."""


def any_policy(policy: Policy) -> None:
    """Nothing is missing, whatever a policy asks for."""


class PolicyFile:
    """The policy in force. `reloads` and `failures` count the changes that were taken and those that were not.

    `check` raises `Unfit` for a policy that cannot be obeyed here.
    """

    def __init__(self, path: Path, check: Callable[[Policy], None] = any_policy) -> None:
        """Reads the file; raises `FileMistakes`, `Unfit` or `OSError`."""
        self._path = path
        self._check = check
        self._jwks_path: Path | None = None
        self._asked = asyncio.Event()
        self._taken = self._look()
        self.current = self._accept(self._read())
        self.reloads = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"<PolicyFile {self._path} {self.current.version} reloads={self.reloads} failures={self.failures}>"

    async def reload(self) -> None:
        """Read the file now, and take it if it is right."""
        # Looked at before it is read: what changes meanwhile is seen as another change.
        self._taken = self._look()
        try:
            policy = await asyncio.to_thread(self._read)
        except (FileMistakes, Unfit, OSError) as error:
            self.failures += 1
            log.error("policy not taken, %s stays in force: %s", self.current.version, error)
            return
        except Exception:
            # A mistake of ours must not end the watch: no later change would be taken.
            self.failures += 1
            log.exception("policy not taken, %s stays in force", self.current.version)
            return
        self.current = self._accept(policy)
        self.reloads += 1
        log.info("policy %s is in force", policy.version)

    def ask(self) -> None:
        """Have whoever watches reload at once, whatever the file looks like. May be called by a signal handler."""
        self._asked.set()

    async def watch(self) -> None:
        """Reload on every change, for ever."""
        before = self._taken
        while True:
            asked = await self._pause()
            now = self._look()
            if asked or (now == before and now != self._taken):
                await self.reload()
            before = now

    async def _pause(self) -> bool:
        """Wait for the next look; whether a reload is asked for."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    def _read(self) -> Policy:
        policy = read_policy(self._path)
        self._check(policy)
        return policy

    def _accept(self, policy: Policy) -> Policy:
        file = None if policy.jwt is None else policy.jwt.jwks_file
        self._jwks_path = None if file is None else Path(file)
        return policy

    def _look(self) -> Looks:
        return _looks(self._path), None if self._jwks_path is None else _looks(self._jwks_path)


def _looks(path: Path) -> Look | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise FileMistakes(str(path), [Mistake(1, "", f"is longer than {MAX_BYTES} bytes")])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FileMistakes(str(path), [Mistake(1, "", "is not UTF-8")]) from None


def _check_jwks(text: str, file: str) -> None:
    try:
        keys = json.loads(text)["keys"]
        right = isinstance(keys, list) and all(isinstance(key, dict) for key in keys)
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise FileMistakes(file, [Mistake(1, "", "must be a JSON Web Key Set: an object with a list of keys")])
