"""The server's side of HTTP/1.1: uvicorn's protocol, more careful with what comes, and with an answer's first packet.

Owns what a client may do before there is a request: how long a head may be and take, how long a body may be silent,
and what is refused as no request. llhttp (the parser of Node, at its strictest) refuses everything that two servers
could read differently; trailers, which are not checked by whoever checks headers, are dropped here.

uvicorn writes a head as soon as it has one, so that even a short answer takes two system calls and arrives in two
packets. Here a head waits for what follows it, until the next turn of the event loop at the most.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import envelope
from gateway.http.parser import RequestParser
from gateway.telemetry.record import REQUEST_ID
from policies.policy import HEADER, RECEIPT_HEADER

MAX_HEAD_BYTES = 64 * 1024
"""So much may come in a row that is no body: a request's head, trailers, extensions of chunks."""

PATIENCE_S = 60.0
"""How long a head may take in all, and how long a client may be silent in the middle of a body."""

LINGER_S = 1.0
"""How long what comes behind a refusal is read and dropped: to close at once would reset the connection, and the client
might not get to see why."""

ONCE = {name.lower().encode(): name for name in ("Host", "Authorization", "Content-Type", HEADER, RECEIPT_HEADER)}
"""Headers that hold one value. Of two, whoever stands in front of us, or behind, might go by the other one."""

_HEAD = b"HTTP/1."
_LINE = len(b": \r\n")
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Refused(Exception):
    """What came is not answered by the application; `status` and the message say why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _head_too_long() -> Refused:
    return Refused(431, f"the request's head is over {MAX_HEAD_BYTES} bytes")


def _not_one(header: bytes) -> Refused:
    return Refused(400, f"there must be one {ONCE[header]} header")


class HttpServerProtocol(HttpToolsProtocol):
    """To be uvicorn's `http`."""

    patience_s = PATIENCE_S

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser: RequestParser = RequestParser(self)
        self._refused: Refused | None = None
        self._in_request = self._in_body = False
        self._head_bytes = 0
        self._seen: set[bytes] = set()
        self._since_body = 0
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, HeadFirst(transport, self.loop)))
        self._begin_watch()

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._since_body += len(data)
        super().data_received(data)
        if self._refused is not None:
            return  # and that has been said
        if not self._in_request:
            self._end_watch()
        elif self._since_body > MAX_HEAD_BYTES:
            self._refuse(_head_too_long())
        elif self._watch is None:
            self._begin_watch()
        elif self._in_body:
            self._heard_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        super().connection_lost(exc)

    # What the parser calls. An exception here makes it give up, and uvicorn call `send_400_response`.

    def on_message_begin(self) -> None:
        self._in_request = True
        self._head_bytes = 0
        self._seen.clear()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._refusing(_head_too_long())
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + _LINE
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._refusing(_head_too_long())
        if self._in_body:
            return  # a trailer
        lowered = name.lower()
        if lowered in ONCE:
            if lowered in self._seen:
                raise self._refusing(_not_one(lowered))
            self._seen.add(lowered)
        elif lowered == b"transfer-encoding" and value.strip().lower() != b"chunked":
            # The parser takes any codings whose last is chunked, and hands the body on as if there were no others.
            raise self._refusing(Refused(400, "the only transfer coding understood is chunked"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.offers:
            return
        if self.parser.should_upgrade():
            raise self._refusing(Refused(400, "this is no proxy: CONNECT is not answered"))
        if b"host" not in self._seen and self.parser.get_http_version() == "1.1":
            raise self._refusing(_not_one(b"host"))
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.offers:
            return  # its head is read again
        self._in_request = self._in_body = False
        self._since_body = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong and close; where an answer is under way, which would be taken to hold it, just close."""
        self._end_watch()
        self._refused = self._refused or Refused(400, "this is no HTTP/1.1 request")
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if answering or self.pipeline or self.transport.is_closing():
            self.transport.close()
            return
        if cycle is not None:
            cycle.disconnected = True  # To the application, who reads the body, the client has left.
            cycle.message_event.set()
        body = msgspec.json.encode(envelope(str(self._refused), "invalid_request_error"))
        status, length = self._refused.status, len(body)
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
            f"{REQUEST_ID}: {uuid.uuid4().hex}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode())
        self.transport.write(body)
        self.transport.write_eof()
        self._watch = self.loop.call_later(LINGER_S, self.transport.close)

    def _refusing(self, refused: Refused) -> Refused:
        self._refused = refused
        return refused

    def _refuse(self, refused: Refused) -> None:
        self._refused = refused
        self.send_400_response("")

    # Patience.

    def _begin_watch(self) -> None:
        self._heard_at = self.loop.time()
        self._watch = self.loop.call_later(self.patience_s, self._look)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        # Where we do not read, the silence is ours.
        quiet_s = 0.0 if self.flow.read_paused else self.loop.time() - self._heard_at
        if quiet_s < self.patience_s:
            self._watch = self.loop.call_later(self.patience_s - quiet_s, self._look)
        elif not self._in_request:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(Refused(408, f"the request did not come to its end within {self.patience_s:g} s"))


class HeadFirst:
    """A transport that keeps the head of an answer back until something follows, or until its turn is over."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __repr__(self) -> str:
        return f"<HeadFirst {self._transport!r} holding {len(self._head)} bytes>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """As a transport does. A body that looks like a head is only written a moment later."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Write what is held, then close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)
