"""A backend's log lines carry the id that the gateway gave their request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys

import pytest
from starlette.types import Message, Receive, Scope, Send

from backend.server.logs import JsonLines, RequestIds, TextLines


@pytest.mark.parametrize(
    ("sent", "said"), [(b"mine-1", " request_id=mine-1"), (b"", ""), (b"two\nlines", ""), (b"x" * 129, "")]
)
async def test_lines_of_a_request_carry_its_id_and_those_of_others_do_not(sent: bytes, said: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines("%(message)s"))
    log = logging.getLogger("backend.test")
    log.addHandler(handler)
    other = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        other.set()
        await asyncio.sleep(0)
        log.warning("here")

    async def receive() -> Message:
        raise AssertionError("nobody reads")

    async def send(message: Message) -> None:
        raise AssertionError("nobody answers")

    async def elsewhere() -> None:
        await other.wait()
        log.warning("elsewhere")

    try:
        scope = {"type": "http", "headers": [(b"x-request-id", sent)] if sent else []}
        await asyncio.gather(asyncio.create_task(RequestIds(app)(scope, receive, send)), elsewhere())
    finally:
        log.removeHandler(handler)
    assert sorted(stream.getvalue().splitlines()) == sorted(["elsewhere", f"here{said}"])


async def test_a_line_of_json_has_the_parts_of_the_gateways() -> None:
    said: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raise KeyError("gone")
        except KeyError:
            record = logging.LogRecord("backend.x", logging.ERROR, "", 0, "it %s\n", ("broke",), sys.exc_info())
        said.append(JsonLines().format(record))

    async def nothing(*message: Message) -> Message:
        raise AssertionError("nobody reads or answers")

    await asyncio.create_task(
        RequestIds(app)({"type": "http", "headers": [(b"x-request-id", b"mine")]}, nothing, nothing)
    )
    line = json.loads(said[0])
    assert line.pop("time").endswith("Z")
    assert "KeyError: 'gone'" in line.pop("exception")
    assert line == {"level": "error", "logger": "backend.x", "message": "it broke\n", "request_id": "mine"}
    assert "\n" not in said[0]
