"""A load of chat requests on an HTTP server, cheap enough to measure servers with.

Each connection sends its next request when the last answer is complete. Answers are read to their end and checked for
their status and length, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from benchmarks.http_upstream import CHUNKS


@dataclass(slots=True)
class Tally:
    """What came of a load; times in seconds from sending a request."""

    whole_s: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def request(model: str, *, stream: bool) -> bytes:
    """A request of about 1.6 KB."""
    messages = [{"role": "user", "content": "Tell me something about the weather. " * 40}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 100, "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer sk-bench\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(port: int, model: str, *, requests: int, concurrent: int, stream: bool) -> Tally:
    """Send so many requests over so many connections."""
    tally = Tally()
    numbers = iter(range(requests))
    sent = request(model, stream=stream)

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            for _ in numbers:
                started = time.perf_counter()
                writer.write(sent)
                status, length, chunked, first = await _head(reader)
                tally.first_byte_s.append(first - started)
                events = await _chunks(reader) if chunked else (await reader.readexactly(length)).count(b"data: ")
                tally.whole_s.append(time.perf_counter() - started)
                if status != 200 or (stream and events != CHUNKS + 1):
                    tally.errors.append(f"status {status}, {events} events")
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            tally.errors.append(repr(error))
        finally:
            writer.close()

    await asyncio.gather(*(connection() for _ in range(concurrent)))
    return tally


async def _head(reader: asyncio.StreamReader) -> tuple[int, int, bool, float]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    first = time.perf_counter()
    lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
    chunked = headers.get(b"transfer-encoding") == b"chunked"
    return int(lines[0].split(b" ")[1]), int(headers.get(b"content-length", 0)), chunked, first


async def _chunks(reader: asyncio.StreamReader) -> int:
    events = 0
    while size := int(await reader.readline(), 16):
        events += (await reader.readexactly(size + 2)).count(b"data: ")
    await reader.readline()
    return events
