"""The head of an answer is written together with what follows it, and never kept for longer than a turn of the loop."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gateway.http.server import HeadFirst

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def head_first() -> tuple[HeadFirst, Written]:
    written = Written()
    return HeadFirst(cast(asyncio.Transport, written), asyncio.get_running_loop()), written


async def test_head_and_body_are_one_write() -> None:
    transport, written = head_first()
    transport.write(HEAD)
    transport.write(b"one")
    transport.write(b"two")
    assert written.writes == [HEAD + b"one", b"two"]
    await asyncio.sleep(0)
    assert written.writes == [HEAD + b"one", b"two"]


async def test_a_head_alone_is_written_when_the_turn_is_over() -> None:
    transport, written = head_first()
    transport.write(HEAD)
    assert not written.writes
    await asyncio.sleep(0)
    assert written.writes == [HEAD]
    transport.write(b"one")
    assert written.writes == [HEAD, b"one"]


@pytest.mark.parametrize("writes", [[HEAD], [HEAD, HEAD], [b"x", HEAD]])
async def test_closing_loses_nothing(writes: list[bytes]) -> None:
    transport, written = head_first()
    for write in writes:
        transport.write(write)
    transport.close()
    assert transport.is_closing()
    assert b"".join(written.writes) == b"".join(writes)
    await asyncio.sleep(0)
    assert b"".join(written.writes) == b"".join(writes)
