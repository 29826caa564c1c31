"""The outermost layer: gives each request its id and its record, and looks at the record when it has ended.

Owns the header `x-request-id`, in and out. What is in the record is the business of those who serve the request.
"""

from __future__ import annotations

import uuid
from time import perf_counter

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.telemetry.conventions import finish_span
from gateway.telemetry.logs import log_access
from gateway.telemetry.record import REQUEST_ID, Record, begin_recording
from gateway.telemetry.tracing import NO_TRACING, Tracing
from gateway.telemetry.traffic import Traffic

CLIENT_LEFT = 499
"""The status of an answer that nobody was there to get, as nginx has it."""
UNKNOWN = "other"
"""The route of requests for paths that there are none of here: what clients make up becomes no label."""
MAX_PATH = 200
"""So much of such a path is logged."""

_REQUEST_ID = REQUEST_ID.encode()


class Observed:
    """The whole application, with its requests summed up in `traffic` and, if `logs`, each logged at its end.

    The server makes a task for each request, so a record ends with its task.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic, tracing: Tracing, *, logs: bool, logs_bodies: bool) -> None:
        self._app = app
        self._traffic = traffic
        self._tracing = tracing
        self._logs = logs
        self._logs_bodies = logs_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _sane(headers.get(_REQUEST_ID, b"")) or uuid.uuid4().hex
        record = Record(request_id, scope["method"], began=perf_counter(), keeps_body=self._logs_bodies)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        self._traffic.in_flight += 1
        if self._tracing is not NO_TRACING:
            parents = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items())
            record.span = self._tracing.request(dict(parents))
        begin_recording(record)
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
                if record.route == UNKNOWN:
                    record.path = scope["path"][:MAX_PATH]
            self._traffic.in_flight -= 1
            if not record.status:
                record.status = CLIENT_LEFT  # Nothing was sent, so nobody was there.
            self._traffic.add(record)
            finish_span(record)
            if self._logs:
                log_access(record)


def _sane(raw: bytes) -> str | None:
    text = raw.decode("latin-1")
    return text if 0 < len(text) <= 128 and text.isascii() and text.isprintable() else None
