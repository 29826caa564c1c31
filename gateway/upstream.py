"""OpenAI servers that answer for a model without a guarantee: which of them is asked, and what is sent to it.

Owns the choice among them, their keys and the headers of a request on its way there. The answer is handed on as it
comes, whatever its status: an upstream's 429 is the client's. So only a request that reached nobody is sent elsewhere;
one that did may have been worked on, and generating is not idempotent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from gateway.backend_client import translated
from gateway.breaker import Breaker
from gateway.errors import BackendError, BackendUnreachable
from gateway.models_file import UpstreamConfig

Header = tuple[str, str]

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, 7.6.1: they speak of one connection, not of the message."""

_OURS = frozenset({"host", "content-length", "expect", "authorization"})
"""Said anew on the way to an upstream. The client's credentials are for this gateway alone."""

_PREFIX = "x-verbatim-"
_MODEL, _DETERMINISM = "model", "is_deterministic"


class Upstream:
    """One OpenAI server."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.in_flight = 0
        self.breaker = Breaker()
        self.answers: Counter[str] = Counter()
        """Calls by the class of their status, or "failed"."""

    def __repr__(self) -> str:
        return f"<Upstream {self.config.url} in_flight={self.in_flight} {self.breaker!r}>"

    def body(self, content: bytes, more: Mapping[str, int]) -> bytes:
        """The client's body: byte for byte, unless it holds what the upstream calls differently or does not know.

        `more` is set in it.
        """
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        model = msgspec.json.encode(self.config.model)
        if bytes(fields[_MODEL]) == model and _DETERMINISM not in fields and not more:
            return content
        fields[_MODEL] = msgspec.Raw(model)
        fields.pop(_DETERMINISM, None)
        return msgspec.json.encode({**fields, **more})

    def headers(self, headers: Iterable[Header]) -> list[Header]:
        """The client's headers, without what is not for the upstream, and with its key."""
        sent = [(name, value) for name, value in end_to_end(headers) if name not in _OURS and name[:11] != _PREFIX]
        return sent if self.config.key is None else [*sent, ("authorization", f"Bearer {self.config.key}")]


class UpstreamGroup:
    """The upstreams of one model, in the order in which they are configured."""

    def __init__(self, http: aiohttp.ClientSession, configs: Sequence[UpstreamConfig]) -> None:
        assert configs
        self._http = http
        self.upstreams = [Upstream(config) for config in configs]

    def __repr__(self) -> str:
        return f"<UpstreamGroup {self.upstreams}>"

    @asynccontextmanager
    async def post(
        self, path: str, headers: Sequence[Header], content: bytes, more: Mapping[str, int]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a JSON body that names a model, with `more` set in it, to `path` below the base URL.

        The response has not been read.

        Leaving the context before it has been read closes its connection. Raises `BackendError`.
        """
        upstream, response = await self._send(path, headers, content, more)
        try:
            yield response
        finally:
            response.release()
            upstream.in_flight -= 1

    async def _send(
        self, path: str, headers: Sequence[Header], content: bytes, more: Mapping[str, int]
    ) -> tuple[Upstream, aiohttp.ClientResponse]:
        failed: list[Upstream] = []
        while True:
            upstream = self._choose(failed)
            upstream.in_flight += 1
            upstream.breaker.begin(_now())
            try:
                with translated():
                    response = await self._http.post(
                        upstream.config.url + path,
                        data=upstream.body(content, more),
                        headers=upstream.headers(headers),
                        skip_auto_headers=("content-type",),
                        allow_redirects=False,
                    )
            except BaseException as error:
                upstream.in_flight -= 1
                upstream.breaker.settled()
                if isinstance(error, BackendError):
                    upstream.answers["failed"] += 1
                if not isinstance(error, BackendUnreachable):
                    raise
                upstream.breaker.failed(_now())
                failed.append(upstream)
                if len(failed) == len(self.upstreams):
                    raise
            else:
                upstream.breaker.succeeded()
                upstream.answers[f"{response.status // 100}xx"] += 1
                return upstream, response

    def _choose(self, but: Sequence[Upstream]) -> Upstream:
        left = [upstream for upstream in self.upstreams if upstream not in but]
        well = [upstream for upstream in left if upstream.breaker.allows(_now())]
        return min(well or left, key=lambda upstream: upstream.in_flight)


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Headers that are to reach the other end, in order; names are in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lower if name == "connection" for token in value.split(",")}
    return [(name, value) for name, value in lower if name not in HOP_BY_HOP and name not in named]


def _now() -> float:
    return asyncio.get_running_loop().time()
