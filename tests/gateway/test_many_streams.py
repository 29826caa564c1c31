"""A thousand verified streams at once, in mid-stream all of them, through one gateway of bounded memory."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from test_cli import free_ports, process, read_until
from toy_backend import ToyBackend, Wait, on

STREAMS = 1000
GROWTH_MB = 30
"""What the allocator may keep; a stream that left something behind would show a thousand times."""


def request(seed: int) -> bytes:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "is_deterministic": True,
        "seed": seed,
        "max_tokens": 12,
        "logprobs": True,
    }
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def stream(port: int, seed: int, begun: asyncio.Semaphore) -> bytes:
    """The events of one answer, but for its times; `begun` is released when the first has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(seed))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head + await reader.read()
        first = await reader.readuntil(b"\n\n")
        begun.release()
        body = first + await reader.read()
    finally:
        writer.close()
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1].rstrip() == b"[DONE]", body
    return b"\n".join(json.dumps({**json.loads(event), "created": 0}).encode() for event in events[:-1])


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
async def test_a_thousand_verified_streams() -> None:
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "gateway.cli", "gateway", "--port", str(port), "--max-concurrent", str(STREAMS)]
    async with ToyBackend() as toy:
        with process([*argv, "--backend", toy.url, "--no-access-log"]) as gateway:
            await asyncio.to_thread(read_until, gateway, f":{port}/v1")
            expected = [await stream(port, seed, asyncio.Semaphore(0)) for seed in range(4)]
            assert len(set(expected)) == 4
            sizes = []
            for _ in range(2):
                release, begun = asyncio.Event(), asyncio.Semaphore(0)
                toy.faults = on("/v1/draft", Wait(release))
                streams = [asyncio.create_task(stream(port, number % 4, begun)) for number in range(STREAMS)]
                for _ in streams:
                    await toy.hung.acquire()
                    await begun.acquire()
                release.set()
                answers = await asyncio.gather(*streams)
                assert all(answer == expected[number % 4] for number, answer in enumerate(answers))
                sizes.append(memory_mb(gateway.pid))
                toy.requests.clear()
                toy.heads.clear()
            assert sizes[-1] - sizes[0] < GROWTH_MB, sizes
