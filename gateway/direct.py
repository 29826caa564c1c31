"""Calls the endpoints that generate straight away: the layers of the application before them cost as much as a hit.

Stands in front of the application, which still owns these paths for every other method. Errors become the same answers
as there.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.error_response import ErrorHandler


class Direct:
    """`endpoints` answer POST at their paths; `handlers` make answers of what they raise, the first that fits."""

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, ASGIApp], handlers: Mapping[type[Exception], ErrorHandler]
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._handlers = handlers

    def __repr__(self) -> str:
        return f"<Direct {', '.join(self._endpoints)}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await endpoint(scope, receive, watch)
        except Exception as error:
            kind = next(kind for kind in self._handlers if isinstance(error, kind))
            if not begun:
                response = await self._handlers[kind](Request(scope), error)
                await response(scope, receive, send)
            if begun or kind is Exception:
                raise
