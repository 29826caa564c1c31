"""The way to what generates that leaves the application's layers out, and answers errors as they do."""

from __future__ import annotations

from typing import Any

import pytest
from launched import Gateway
from starlette.types import Message, Receive, Scope, Send

from gateway.app import ERROR_HANDLERS
from gateway.direct import Direct
from gateway.errors import ClientLeft, RequestError


class Endpoint:
    """Raises an error, before it has begun to answer or after."""

    def __init__(self, error: Exception, *, begins: bool) -> None:
        self._error = error
        self._begins = begins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise self._error


async def ask(error: Exception, *, begins: bool = False, method: str = "POST", path: str = "/x") -> list[Message]:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": []}
    try:
        await Direct(application, {"/x": Endpoint(error, begins=begins)}, ERROR_HANDLERS)(scope, receive, send)
    except ZeroDivisionError:
        sent.append({"type": "raised"})
    return sent


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RequestError("no"), [400]), (ClientLeft(), [499]), (ZeroDivisionError(), [500, "raised"])],
)
async def test_errors_before_the_first_byte_are_answered(error: Exception, expected: list[object]) -> None:
    sent = [message for message in await ask(error) if message["type"] != "http.response.body"]
    assert [message.get("status", message["type"]) for message in sent] == expected


async def test_behind_the_first_byte_an_error_is_only_raised() -> None:
    sent = await ask(ZeroDivisionError(), begins=True)
    assert [message["type"] for message in sent] == ["http.response.start", "raised"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/x"), ("POST", "/y")])
async def test_everything_else_is_the_applications(method: str, path: str) -> None:
    assert [message["status"] for message in await ask(ZeroDivisionError(), method=method, path=path)] == [404]


async def test_other_methods_are_refused_as_ever(gateway: Gateway) -> None:
    response = await gateway.http.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
