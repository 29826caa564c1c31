"""HTTP/1.1 to backends, upstreams and issuers of tokens: connections kept, bytes written, silence noticed.

Does what a gateway needs and no more: a body in memory, an answer read as it comes, no redirects, no cookies, no
decompression, no headers of its own but Host and Content-Length. Owns deadlines of connecting and of silence, and the
translation of what sockets do wrong into our errors. Each request is tried once, but for a GET on a connection that
turns out to have been closed.

Connections are not limited here. Admission bounds what is in flight; a second, silent bound would only add waiting.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast
from urllib.parse import quote, urlsplit

from gateway.errors import BackendError, BackendFailed, BackendTimeout, BackendUnreachable, ConfigError
from gateway.http.answer import HttpAnswer

Header = tuple[bytes, bytes]

KEEPALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection, so that we never write into one being closed."""

_AS_IT_IS = "/%:@!$&'()*+,;=~"

HIGH_WATER_BYTES = 64 * 1024
"""With so much of an answer unread its server is held back."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a base URL leads. `authority` is what a Host header says, `path` what all targets begin with."""

    host: str
    port: int
    tls: bool
    authority: bytes
    path: bytes

    @classmethod
    def at(cls, url: str) -> Self:
        """Raises `ConfigError` for what leads nowhere."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"not an http:// or https:// URL: {url}")
        tls = parts.scheme == "https"
        name = parts.hostname.encode("idna").decode() if ":" not in parts.hostname else f"[{parts.hostname}]"
        authority = name if parts.port is None else f"{name}:{parts.port}"
        path = quote(parts.path.rstrip("/"), safe=_AS_IT_IS)
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, authority.encode(), path.encode())

    @classmethod
    def of(cls, url: str) -> tuple[Self, bytes]:
        """The server of a whole URL, and the target there."""
        parts = urlsplit(url)
        query = f"?{quote(parts.query, safe=_AS_IT_IS + '?')}" if parts.query else ""
        target = quote(parts.path or "/", safe=_AS_IT_IS) + query
        return cls.at(f"{parts.scheme}://{parts.netloc}"), target.encode()


class HttpClient:
    """The connections of a whole gateway. To be made in its event loop."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        silence_timeout_s: float,
        keepalive_s: float = KEEPALIVE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` says whose certificates are trusted; without it, those the system trusts."""
        self._connect_timeout_s = connect_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Server, list[_Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._tls = tls

    def __repr__(self) -> str:
        return f"<HttpClient idle={sum(map(len, self._idle.values()))}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what is idle; what is in use closes when its answer is."""
        self._close_idle(float("inf"))
        if self._sweep is not None:
            self._sweep.cancel()

    async def get(self, server: Server, target: bytes, headers: Iterable[Header] = ()) -> Incoming:
        """As `post`, for what may be asked twice."""
        used = bool(self._idle.get(server))
        try:
            return await self._ask(b"GET", server, target, headers, b"")
        except BackendFailed:
            if not used:
                raise
            for connection in self._idle.pop(server, []):
                connection.close()  # They may be gone too.
            return await self._ask(b"GET", server, target, headers, b"")

    async def post(self, server: Server, target: bytes, headers: Iterable[Header], body: bytes) -> Incoming:
        """Send a body to `target` below the base URL and wait for the answer's head; raises `BackendError`.

        The headers come from a parsed request or from our settings: they hold no line breaks.
        """
        return await self._ask(b"POST", server, target, headers, body)

    async def _ask(
        self, method: bytes, server: Server, target: bytes, headers: Iterable[Header], body: bytes
    ) -> Incoming:
        head = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (method, server.path, target, server.authority)]
        head += [b"%b: %b\r\n" % header for header in headers]
        if method == b"POST":
            head.append(b"content-length: %d\r\n" % len(body))
        head.append(b"\r\n")
        sent = b"".join(head)
        assert sent.count(b"\n") == len(head) + 1
        connection = await self._connection(server)
        incoming = Incoming(self, server, connection)
        try:
            await connection.ask(sent, body)
        except BaseException:
            incoming.close()
            raise
        return incoming

    async def _connection(self, server: Server) -> _Connection:
        idle = self._idle.get(server, [])
        while idle:
            connection = idle.pop()
            if connection.idle_since > self._loop.time() - self._keepalive_s and connection.silent:
                return connection
            connection.close()
        if server.tls and self._tls is None:
            self._tls = ssl.create_default_context()  # Two megabytes, for those who need it.
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self._loop, self._silence_timeout_s),
                    server.host,
                    server.port,
                    ssl=self._tls if server.tls else None,
                )
        except TimeoutError as error:
            raise BackendUnreachable("the backend cannot be reached: the connection took too long") from error
        except OSError as error:
            raise BackendUnreachable(f"the backend cannot be reached: {error.strerror or error}") from error
        return connection

    def keep(self, server: Server, connection: _Connection) -> None:
        """Have a connection wait for its next request."""
        self._idle.setdefault(server, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._keepalive_s, self._close_old)

    def _close_old(self) -> None:
        self._close_idle(self._loop.time() - self._keepalive_s)
        self._sweep = self._loop.call_later(self._keepalive_s, self._close_old) if self._idle else None

    def _close_idle(self, before: float) -> None:
        for connections in self._idle.values():
            for connection in connections:
                if connection.idle_since <= before:
                    connection.close()
        left = {server: [one for one in connections if one.open] for server, connections in self._idle.items()}
        self._idle = {server: connections for server, connections in left.items() if connections}


class Incoming:
    """An answer whose head has come. To be closed: before its end that closes the connection."""

    def __init__(self, client: HttpClient, server: Server, connection: _Connection) -> None:
        self._client = client
        self._server = server
        self._connection = connection
        self._answer = connection.answer

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> list[Header]:
        return self._answer.headers

    def header(self, name: bytes) -> str | None:
        """The value of a header, by its name in lower case."""
        value = dict(self.headers).get(name)
        return None if value is None else value.decode("latin-1")

    def read_some(self) -> Awaitable[bytes]:
        """What has come of the body, as soon as anything has; empty at its end. Raises `BackendError`."""
        return self._connection.read_some()

    async def read(self) -> bytes:
        """All that is left of the body."""
        parts = []
        while part := await self.read_some():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Let the connection be used again, or close it."""
        if self._answer.complete and self._answer.reusable and self._connection.sent:
            self._connection.rest()
            self._client.keep(self._server, self._connection)
        else:
            self._connection.close()


class _Connection(asyncio.Protocol):
    """One connection: one request at a time, its answer handed over as it is read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, silence_timeout_s: float) -> None:
        self._loop = loop
        self._silence_timeout_s = silence_timeout_s
        self._transport: asyncio.Transport | None = None
        self._asked = False
        self._error: BackendError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._held_back = False
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self.answer = HttpAnswer()
        self.idle_since = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def silent(self) -> bool:
        """Whether the connection is open and nothing has come over it that nobody asked for, its end above all: that
        may wait to be read by the event loop while the next request is on its way. One call of the system's tells."""
        if self._transport is None or self._transport.is_closing():
            return False
        look = select.poll()
        look.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not look.poll(0)

    @property
    def sent(self) -> bool:
        """Whether the connection is open and nothing is left to be written: a server may answer before it has read all,
        and what is left would stand in the next request's way."""
        return self.open and self._transport is not None and not self._transport.get_write_buffer_size()

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the head of its answer."""
        assert self._transport is not None
        self._asked = True
        self._heard_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._silence_timeout_s, self._check_silence)
        self._transport.writelines((head, body))
        while not self.answer.begun:
            await self._more()

    async def read_some(self) -> bytes:
        answer = self.answer
        while not answer.waiting_bytes:
            if answer.complete:
                return b""
            await self._more()
        body = answer.take()
        self._read_on()
        return body

    def rest(self) -> None:
        """Be ready for the next request."""
        self._asked = False
        self.answer = HttpAnswer()
        self.idle_since = self._loop.time()
        self._read_on()  # Of the last answer something may have been left unread.

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _read_on(self) -> None:
        if self._held_back and self._transport is not None:
            self._held_back = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def _more(self) -> Awaitable[None]:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: BackendError) -> None:
        self._error = self._error or error
        self.close()
        self._wake()

    def _check_silence(self) -> None:
        # One timer looks now and then; setting it anew at each piece of an answer would cost more than the piece.
        self._watch = None
        if not self._asked or not self.open:
            return
        quiet_s = 0.0 if self._held_back else self._loop.time() - self._heard_at
        if quiet_s >= self._silence_timeout_s:
            self._fail(BackendTimeout("the backend did not answer in time"))
        else:
            self._watch = self._loop.call_later(self._silence_timeout_s - quiet_s, self._check_silence)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._asked:
            self.close()  # Nobody asked.
            return
        self._heard_at = self._loop.time()
        try:
            self.answer.feed(data)
        except BackendError as error:
            self._fail(error)
            return
        if self.answer.waiting_bytes > HIGH_WATER_BYTES and not self._held_back and self._transport is not None:
            self._held_back = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
        if self._error is not None:
            return  # We closed it. That is no end of the answer, also of one that ends with its connection.
        try:
            if error is not None and not self.answer.complete:
                raise BackendFailed(f"the connection to the backend broke: {error}") from error
            self.answer.feed_eof()
        except BackendError as failed:
            self._error = failed
        self._wake()
