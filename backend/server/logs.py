"""A backend's log lines: for people, or as one JSON object each, with the id of the request that they belong to.

The id is the gateway's (`x-request-id`), and so are the names of a line's parts.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

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


def configure_logs(form: Literal["text", "json"], stream: TextIO) -> None:
    """Have this process's log lines written so."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class TextLines(logging.Formatter):
    """A line and behind it its request's id, where there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        id_ = _current.get()
        return super().formatMessage(record) + (f" request_id={id_}" if id_ else "")


class JsonLines(logging.Formatter):
    """`time`, `level`, `logger`, `message`, and `request_id` and `exception` where there are."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id_ := _current.get():
            line["request_id"] = id_
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
