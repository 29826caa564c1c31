"""An OpenAI server that answers with given bytes, cut where a test says, and keeps what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Received:
    """A request as it came: the request line, the headers in order (names in lower case), the body."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes


def plain(body: bytes, status: str = "200 OK", *headers: str) -> list[bytes]:
    """A whole answer."""
    head = "\r\n".join([f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}"])
    return [head.encode() + b"\r\n\r\n" + body]


def chunked(pieces: Sequence[bytes], *headers: str, end: bool = True) -> list[bytes]:
    """An answer in chunks, each written by itself; without `end` the connection is closed before the last one."""
    head = "\r\n".join(["HTTP/1.1 200 OK", *headers, "transfer-encoding: chunked"]).encode() + b"\r\n\r\n"
    return [
        head,
        *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece),
        *([b"0\r\n\r\n"] if end else []),
    ]


@dataclass
class MockUpstream:
    """`answer` is what is written to each request; None says nothing until the caller leaves, which `left` tells.

    With `stays` that is waited for behind an answer too.
    """

    answer: list[bytes] | None = field(default_factory=lambda: plain(b"{}"))
    received: list[Received] = field(default_factory=list)
    hung: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    left: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    stays: bool = False

    async def __aenter__(self) -> MockUpstream:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/base"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (item.partition(":") for item in rest if item)]
        body = await reader.readexactly(int(dict(headers).get("content-length", 0)))
        self.received.append(Received(line, headers, body))
        for piece in self.answer or ():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if self.answer is None or self.stays:
            self.hung.release()
            assert await reader.read(1) == b""
            self.left.release()
            return False
        # An answer that does not say where it ends does so by closing.
        return self.answer[-1].endswith(b"0\r\n\r\n") or b"content-length" in self.answer[0]
