"""The public keys that JSON web tokens are checked with: from the policy's key set, or fetched from their issuer.

Owns when keys are fetched. Keys from a URL are fetched when they are first needed, again when they are old, and for an
id that is not among them, since issuers change keys: but seldom, because anybody can invent ids. Old keys stay in use
while the issuer cannot be reached; without any the answer is an error of ours, not of the client's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from jwt import PyJWK, PyJWTError

from gateway.errors import BackendError, IssuerUnavailable
from gateway.http.client import HttpClient, Server
from policies.document import Jwt

MAX_AGE_S = 600.0
UNKNOWN_ID_EVERY_S = 30.0
RETRY_EVERY_S = 5.0
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class KeySet:
    """A JSON Web Key Set (RFC 7517). What cannot be used to check signatures is left out."""

    def __init__(self, text: str | bytes) -> None:
        """Raises `ValueError` for what is no key set."""
        document = json.loads(text)
        keys = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(keys, list):
            raise ValueError("not a JSON Web Key Set")
        self._keys: Sequence[Mapping[str, object]] = [
            key for key in keys if isinstance(key, dict) and key.get("use", "sig") == "sig"
        ]
        self._made: dict[tuple[object, str], PyJWK | None] = {}

    def __repr__(self) -> str:
        return f"<KeySet of {len(self._keys)}>"

    def find(self, id_: str | None, algorithm: str) -> PyJWK | None:
        """The key for a token's header. A token may leave the id out where there is just one key."""
        fitting = [key for key in self._keys if id_ is None or key.get("kid") == id_]
        if len(fitting) != 1:
            return None
        (key,) = fitting
        made = (key.get("kid"), algorithm)
        if made not in self._made:
            self._made[made] = _key(dict(key), algorithm)
        return self._made[made]


def _key(key: dict[str, object], algorithm: str) -> PyJWK | None:
    """The key for one algorithm; None where it is another's, by its own word or by its kind."""
    if key.get("alg", algorithm) != algorithm:
        return None
    try:
        return PyJWK(key, algorithm)
    except (PyJWTError, ValueError, KeyError, TypeError):
        return None


class TokenKeys:
    """Finds keys. Holds those of one policy at a time: after a change the others are forgotten."""

    def __init__(self, http: HttpClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._http = http
        self._clock = clock
        self._source: str | None = None
        self._keys: KeySet | Published | None = None

    def __repr__(self) -> str:
        return f"<TokenKeys {self._keys!r}>"

    async def find(self, jwt: Jwt, id_: str | None, algorithm: str) -> PyJWK | None:
        """The key for a token's header, None if there is none. Raises `IssuerUnavailable`."""
        source = jwt.jwks_url or jwt.jwks
        assert source is not None
        if self._keys is None or source != self._source:
            self._keys = KeySet(source) if jwt.jwks_url is None else Published(self._http, source, self._clock)
            self._source = source
        keys = self._keys
        return keys.find(id_, algorithm) if isinstance(keys, KeySet) else await keys.find(id_, algorithm)


class Published:
    """The keys at one URL."""

    def __init__(self, http: HttpClient, url: str, clock: Callable[[], float]) -> None:
        self._http = http
        self._url = url
        self._clock = clock
        self._keys: KeySet | None = None
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Published {self._keys!r} at {self._url}>"

    async def find(self, id_: str | None, algorithm: str) -> PyJWK | None:
        """As `TokenKeys.find`."""
        # An issuer that hangs holds up the one who asks it, and not all those whose keys are here.
        if self._keys is not None and self._fetching.locked() and (key := self._keys.find(id_, algorithm)) is not None:
            return key
        keys = await self._fresh(MAX_AGE_S)
        return keys.find(id_, algorithm) or (await self._fresh(UNKNOWN_ID_EVERY_S)).find(id_, algorithm)

    async def _fresh(self, max_age_s: float) -> KeySet:
        """Keys fetched at most so long ago if they can be had, else those there are."""
        async with self._fetching:
            now = self._clock()
            if now - self._fetched_at > max_age_s and now - self._tried_at > RETRY_EVERY_S:
                try:
                    self._keys = KeySet(await self._fetch())
                    self._fetched_at = now
                except (BackendError, TimeoutError, ValueError, RecursionError) as error:
                    log.error("the keys at %s cannot be fetched: %s", self._url, type(error).__name__)
                    # Counted from its end: who waited meanwhile need not try what has just taken all of its time. One
                    # whose client left says nothing of the issuer, and is not counted.
                    self._tried_at = self._clock()
        if self._keys is None:
            raise IssuerUnavailable("the keys that tokens are checked with cannot be fetched now", retry_after_s="5")
        return self._keys

    async def _fetch(self) -> bytes:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            incoming = await self._http.get(*Server.of(self._url))
            try:
                if incoming.status != 200:  # A redirect would lead where the policy does not.
                    raise ValueError(f"status {incoming.status}")
                body = bytearray()
                while some := await incoming.read_some():
                    body += some
                    if len(body) > MAX_BYTES:
                        raise ValueError("the key set is too long")
                return bytes(body)
            finally:
                incoming.close()
