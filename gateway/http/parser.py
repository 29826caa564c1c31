"""A parser of requests that stay requests: an `Upgrade` is an offer, and it is not taken.

httptools' parser (llhttp) takes what follows the head of a request with `Upgrade` for another protocol, so the body
would be lost. A server may ignore the offer (RFC 9110, 7.8), and some clients make it with everything they send over
plain text, Java's HttpClient for one. So such a head is read again, without the offer.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools


class Reader(Protocol):
    """Whoever is told what a request holds, as by httptools."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(httptools.HttpRequestParser):
    """To be used as httptools' own. From a head that `offers` until the next one a reader ignores what it is told."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self._reader = reader
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    @property
    def offers(self) -> bool:
        """Whether the head that is complete now offers another protocol, and will be read again without."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """As httptools does; raises `HttpParserUpgrade` for nothing but a tunnel."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.get_method() == b"CONNECT":
                    raise
                data = self._head_without_offer() + bytes(data)[upgrade.args[0] :]
            else:
                return

    def _head_without_offer(self) -> bytes:
        line = b"%b %b HTTP/%b" % (self.get_method(), self._reader.url, self.get_http_version().encode())
        kept = (b"%b: %b" % pair for pair in self._reader.headers if pair[0] != b"upgrade")
        return b"\r\n".join((line, *kept, b"", b""))
