"""The answer to one HTTP/1.1 request, as a state machine: it is fed bytes and tells head, body and end.

    head ──▶ body ──▶ complete          1xx heads are skipped; a body without a length ends with its connection

Knows no sockets and no clock. httptools (llhttp, the parser of Node) reads the wire; what it leaves open is decided
here: how much may come that is no body, and what the end of the connection means.
"""

from __future__ import annotations

import httptools

from gateway.errors import BackendFailed

MAX_HEAD_BYTES = 64 * 1024
"""So much may come in a row that is no body: heads, trailers, extensions of chunks."""

_NO_BODY = (204, 304)


class HttpAnswer:
    """Fed by its connection. Names of headers are in lower case, both as on the wire otherwise."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = False
        """Whether status and headers are all there."""
        self.complete = False
        self.reusable = False
        """Whether the connection can take another request, once complete."""
        self.waiting_bytes = 0
        self._parts: list[bytes] = []
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._until_eof = False
        self._since_body = 0

    def __repr__(self) -> str:
        state = "complete" if self.complete else "body" if self.begun else "head"
        return f"<HttpAnswer {self.status} {state} waiting_bytes={self.waiting_bytes}>"

    def feed(self, data: bytes) -> None:
        """Take what came; raises `BackendFailed` for what is no HTTP, or too much of it."""
        if self._parser is None:
            self.reusable = False  # Nobody asked for more.
            return
        self._since_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # What a callback of ours raised is the context of the parser's own error.
            raise BackendFailed(f"the backend's answer is no HTTP/1.1: {error.__context__ or error}") from error
        if self.complete:
            self._parser = None  # It calls us and we call it: left to itself only the collector would free it.
        elif self._since_body > MAX_HEAD_BYTES:
            raise BackendFailed(f"the backend's answer has a head of over {MAX_HEAD_BYTES} bytes")

    def feed_eof(self) -> None:
        """The connection ended; raises `BackendFailed` unless the answer has."""
        if self.begun and self._until_eof:
            self.complete = True
        if not self.complete:
            raise BackendFailed("the connection to the backend broke off")

    def take(self) -> bytes:
        """What has come of the body since the last time."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.waiting_bytes = 0
        return body

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # Nobody asked for a second answer.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.begun:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        if status >= 600:
            raise ValueError(f"there is no status {status}")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            # The header stays behind with its connection: what it says of the body would be lost.
            raise ValueError("a transfer coding was used that nobody asked for")
        self.status = status
        self.begun = True
        has_length = any(name == b"content-length" for name, _ in self.headers)
        self._until_eof = not (codings or has_length or status in _NO_BODY)

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._parts.append(body)
            self.waiting_bytes += len(body)
            self._since_body = 0

    def on_message_complete(self) -> None:
        if self.begun and not self.complete:
            assert self._parser is not None
            self.complete = True
            self.reusable = self._parser.should_keep_alive()
