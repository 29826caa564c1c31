"""A load of chat requests on an HTTP server, cheap enough to measure servers with.

Each connection sends its next request when the last answer is complete. Answers are read to their end and checked for
their status and, where streamed, for all their tokens and their end; into what chunks they are cut is not looked at.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from benchmarks.http_upstream import CHUNKS, DONE, TOKEN


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


async def load(
    port: int, model: str, *, requests: int, concurrent: int, stream: bool, limit_s: float | None = None
) -> Tally:
    """Send so many requests over so many connections. Those that are not answered within the limit are errors."""
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
                body = await (_chunks(reader) if chunked else reader.readexactly(length))
                tally.whole_s.append(time.perf_counter() - started)
                tokens = body.count(TOKEN)
                if status != 200 or (stream and (tokens != CHUNKS or not body.endswith(DONE))):
                    tally.errors.append(f"status {status}, {tokens} tokens, ends in {body[-40:]!r}")
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            tally.errors.append(repr(error))
        except asyncio.CancelledError:
            tally.errors.append(f"not answered within {limit_s} s")
        finally:
            writer.close()

    asking = [asyncio.create_task(connection()) for _ in range(concurrent)]
    _, late = await asyncio.wait(asking, timeout=limit_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*asking)
    tally.errors += [f"not sent within {limit_s} s"] * sum(1 for _ in numbers)
    return tally


async def _head(reader: asyncio.StreamReader) -> tuple[int, int, bool, float]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    first = time.perf_counter()
    lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
    chunked = headers.get(b"transfer-encoding") == b"chunked"
    return int(lines[0].split(b" ")[1]), int(headers.get(b"content-length", 0)), chunked, first


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(parts)
