"""The gateway without its telemetry, to measure what that costs: ids only, as benchmarks.telemetry's base.

Takes the arguments of `verbatim`.
"""

from __future__ import annotations

import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import app
from gateway.cli import main
from gateway.telemetry import record


class Unobserved:
    """Gives answers their ids and looks at nothing."""

    def __init__(self, inner: ASGIApp, *args: Any, **named: Any) -> None:
        self._app = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _nothing(*args: Any) -> None:
    """In place of what notes."""


if __name__ == "__main__":
    vars(app)["Observed"] = Unobserved
    record._CURRENT.set(record.Record())
    for name in ("wait", "go_on", "call", "piece", "came", "finish_choice", "read"):
        setattr(record.Record, name, _nothing)
    main(prog_name="verbatim")
