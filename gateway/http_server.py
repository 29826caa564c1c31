"""The server's side of HTTP/1.1: uvicorn's protocol, writing the head of an answer together with its body's beginning.

uvicorn writes a head as soon as it has one, so that even a short answer takes two system calls and arrives in two
packets. Here a head waits for what follows it, until the next turn of the event loop at the most.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD = b"HTTP/1."


class HttpServerProtocol(HttpToolsProtocol):
    """To be uvicorn's `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(cast(asyncio.Transport, HeadFirst(transport, self.loop)))


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
