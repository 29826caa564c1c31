"""OpenAI servers that answer for a model without a guarantee: which of them is asked, and what is sent to it.

Owns the choice among them, their keys and the headers of a request on its way there. The answer is handed on as it
comes, whatever its status: an upstream's 429 is the client's. So only a request that reached nobody is sent elsewhere;
one that did may have been worked on, and generating is not idempotent.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from gateway.breaker import Breaker
from gateway.errors import BackendError, BackendUnreachable, RequestError
from gateway.http.client import Header, HttpClient, Incoming, Server
from gateway.models_file import UpstreamConfig
from gateway.telemetry.record import recording
from policies.policy import BODY_FIELD
from policies.settings import SAMPLING

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110, 7.6.1: they speak of one connection, not of the message."""

_OURS = frozenset({b"host", b"content-length", b"expect", b"authorization"})
"""Said anew on the way to an upstream. The client's credentials are for this gateway alone."""

OWN_PREFIX = b"x-verbatim-"
"""What headers begin with in which a gateway speaks of itself, to its clients and they to it."""

_MODEL, _DETERMINISM = "model", BODY_FIELD
_GOVERNED = frozenset({_MODEL, _DETERMINISM, "n", "max_tokens", "max_completion_tokens", *SAMPLING})
"""Fields that a policy has a say in. Some servers take another case for the same name (Go's encoding/json does)."""

_ESCAPED_NAME = re.compile(rb"\\u00[4-7]")
"""How JSON may spell a letter of theirs, or an underscore."""


class Upstream:
    """One OpenAI server."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.server = Server.at(config.url)
        self.in_flight = 0
        self.breaker = Breaker()
        self.answers: Counter[str] = Counter()
        """Calls by the class of their status, or "failed"."""
        key = config.key
        self._credentials = () if key is None else ((b"authorization", b"Bearer " + key.encode("latin-1")),)

    def __repr__(self) -> str:
        return f"<Upstream {self.config.url} in_flight={self.in_flight} {self.breaker!r}>"

    def body(self, content: bytes, more: Mapping[str, int]) -> bytes:
        """The client's body: byte for byte, unless it holds what the upstream calls differently or does not know, or
        may hold twice what was judged: the last one was, and its upstream may heed the first.

        `more` is set in it. Raises `RequestError` for a field that some upstream would take for one that was judged.
        """
        try:
            fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:  # of names that nobody has looked at yet
            raise RequestError(f"the body is not valid JSON: {error}") from error
        for name in fields:
            if name not in _GOVERNED and name.casefold() in _GOVERNED:
                raise RequestError(f"{name!r} must be written {name.casefold()!r}", param=name)
        model = msgspec.json.encode(self.config.model)
        is_theirs = bytes(fields[_MODEL]) == model and _DETERMINISM not in fields and not more
        if is_theirs and not _may_repeat(content, fields):
            return content
        fields[_MODEL] = msgspec.Raw(model)
        fields.pop(_DETERMINISM, None)
        return msgspec.json.encode({**fields, **more})

    def headers(self, headers: Iterable[Header], more: Mapping[str, str]) -> list[Header]:
        """The client's headers, without what is not for the upstream, and with its key; `more` takes their place."""
        said = [(name.encode(), value.encode()) for name, value in more.items()]
        ours = _OURS.union(name for name, _ in said)
        sent = [
            header for header in end_to_end(headers) if header[0] not in ours and not header[0].startswith(OWN_PREFIX)
        ]
        return [*sent, *said, *self._credentials]


class UpstreamGroup:
    """The upstreams of one model, in the order in which they are configured."""

    def __init__(self, http: HttpClient, configs: Sequence[UpstreamConfig]) -> None:
        assert configs
        self._http = http
        self.upstreams = [Upstream(config) for config in configs]

    def __repr__(self) -> str:
        return f"<UpstreamGroup {self.upstreams}>"

    @asynccontextmanager
    async def post(
        self, target: bytes, headers: Sequence[Header], content: bytes, more: Mapping[str, int]
    ) -> AsyncIterator[Incoming]:
        """Send a JSON body that names a model, with `more` set in it, to `target` below the base URL.

        The body of the answer has not been read; leaving the context before it has been closes its connection.
        Raises `BackendError`.
        """
        upstream, incoming = await self._send(target, headers, content, more)
        try:
            yield incoming
        finally:
            incoming.close()
            upstream.in_flight -= 1

    async def _send(
        self, target: bytes, headers: Sequence[Header], content: bytes, more: Mapping[str, int]
    ) -> tuple[Upstream, Incoming]:
        failed: list[Upstream] = []
        record = recording()
        while True:
            upstream = self._choose(failed)
            span = record.span.child("upstream", {"url.full": upstream.config.url}, calls=True)
            upstream.in_flight += 1
            upstream.breaker.begin(_now())
            try:
                with span:
                    sent = upstream.headers(headers, record.headers(span))
                    incoming = await self._http.post(upstream.server, target, sent, upstream.body(content, more))
                    span.set({"http.response.status_code": incoming.status})
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
                upstream.answers[f"{incoming.status // 100}xx"] += 1
                return upstream, incoming

    def _choose(self, but: Sequence[Upstream]) -> Upstream:
        left = [upstream for upstream in self.upstreams if upstream not in but]
        well = [upstream for upstream in left if upstream.breaker.allows(_now())]
        return min(well or left, key=lambda upstream: upstream.in_flight)


def _may_repeat(content: bytes, fields: Iterable[str]) -> bool:
    """Whether a governed field may stand twice in a body. One that only may is written anew in vain, and means the
    same."""
    named = (b'"%b"' % name.encode() for name in fields if name in _GOVERNED)
    return any(content.count(name) > 1 for name in named) or _ESCAPED_NAME.search(content) is not None


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Headers that are to reach the other end, in order; names are in lower case, here as there."""
    headers = list(headers)
    named = {token.strip() for name, value in headers if name == b"connection" for token in value.lower().split(b",")}
    return [header for header in headers if header[0] not in HOP_BY_HOP and header[0] not in named]


def _now() -> float:
    return asyncio.get_running_loop().time()
