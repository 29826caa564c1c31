"""The outermost layer: gives each request its id and its record, and looks at the record when it has ended.

Owns the header `x-request-id`, in and out. What is in the record is the business of those who serve the request.
"""

from __future__ import annotations

import uuid
from time import perf_counter

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.telemetry.record import Record, record_of
from gateway.telemetry.traffic import Traffic

REQUEST_ID = "x-request-id"
UNKNOWN = "other"
"""The route of requests for paths that there are none of here: what clients make up becomes no label."""


class Observed:
    """The whole application, with its requests summed up in `traffic`."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _sane(dict(scope["headers"]).get(REQUEST_ID.encode(), b"")) or uuid.uuid4().hex
        record = Record(request_id, scope["method"], began=perf_counter())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        self._traffic.in_flight += 1
        with record_of(record):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                record.fail("internal_error")
                raise
            finally:
                record.ended = perf_counter()
                if not record.route:
                    # The router leaves its choice in the scope.
                    record.route = getattr(scope.get("route"), "path", UNKNOWN)
                self._traffic.in_flight -= 1
                self._traffic.add(record)


def _sane(raw: bytes) -> str | None:
    text = raw.decode("latin-1")
    return text if 0 < len(text) <= 128 and text.isascii() and text.isprintable() else None
