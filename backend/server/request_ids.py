"""The id that a gateway gives a request (`x-request-id`), in the log lines that the request makes here."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER = b"x-request-id"
_MAX_CHARS = 128
_current: ContextVar[str] = ContextVar("request_id", default="")


class RequestIds:
    """Keeps the id of each request for the lines of the tasks that serve it: the server begins one for each."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            text = dict(scope["headers"]).get(_HEADER, b"").decode("latin-1")
            _current.set(text if len(text) <= _MAX_CHARS and text.isascii() and text.isprintable() else "")
        await self._app(scope, receive, send)


class RequestIdFilter(logging.Filter):
    """Gives each line its request's id, as ` request_id=...` in `record.request`; nothing where there is none."""

    def filter(self, record: logging.LogRecord) -> bool:
        id_ = _current.get()
        record.request = f" request_id={id_}" if id_ else ""
        return True
