"""What a gateway adds: CPU for each request and each streamed chunk, latency, memory; and many streams at once.

All subjects proxy the same mock upstream (http_upstream.py) in one run, one after the other, each in a process of its
own whose CPU time the kernel tells. The direct call is the base of the latencies. A streamed chunk costs what a
streamed request costs more than a whole one, divided by its chunks.

Peers are measured where they are installed, in an environment of their own:

    python -m venv PEERS && PEERS/bin/pip install 'litellm[proxy]' vllm-router
    python -m benchmarks.gateway --peers PEERS
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.http_load import Tally, load
from benchmarks.http_upstream import CHUNKS
from benchmarks.ports import free_port
from benchmarks.report import circumstances, print_table, write

_PATIENCE_S = 120
_LITELLM = """
model_list:
  - model_name: mock
    litellm_params: {model: openai/mock, api_base: "http://127.0.0.1:%d/v1", api_key: none}
"""


@dataclass
class Subject:
    """A server under test. `argv` None stands for the upstream itself."""

    name: str
    port: int
    argv: Sequence[str] | None
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    idle_mb: float = 0.0
    cells: list[dict[str, Any]] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU time of the process and its descendants so far."""
        return sum(map(_cpu_s, self._pids()))

    def memory_mb(self, key: str = "VmRSS") -> float:
        return sum(_memory_mb(pid, key) for pid in self._pids())

    def _pids(self) -> list[int]:
        if self.process is None:
            return []
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found


def _cpu_s(pid: int) -> float:
    """By the clock of the process (clock_getcpuclockid(3)): to the nanosecond, where /proc counts hundredths."""
    return time.clock_gettime(~pid << 3 | 2)


def _memory_mb(pid: int, key: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":")), 0.0)


def subjects(upstream: int, options: argparse.Namespace, folder: Path) -> list[Subject]:
    """The direct call, ours, and the peers; `{port}` and `{upstream}` stand in their commands."""
    base = f"http://127.0.0.1:{upstream}/v1"
    models = folder / "models.yaml"
    models.write_text(f"version: 1\nmodels:\n  mock:\n    upstreams:\n      - url: {base}\n")
    ours = ["-m", "gateway.cli", "gateway", "--no-access-log", "--models", str(models)]
    ours += ["--max-concurrent", "4096", "--port"]
    port = free_port()
    found = [Subject("direct", upstream, None), Subject("verbatim", port, [sys.executable, *ours, str(port)])]
    port = free_port()
    bare = [sys.executable, "-m", "benchmarks.bare_proxy", base, str(port)]
    found.append(Subject("FastAPI + httpx", port, bare))
    if options.peers is not None:
        programs = options.peers / "bin"
        port = free_port()
        argv = [programs / "vllm-router", "--worker-urls", base.removesuffix("/v1"), "--host", "127.0.0.1", "--port"]
        found.append(Subject("vllm-router", port, [*map(str, argv), str(port)]))
        port = free_port()
        config = folder / "litellm.yaml"
        config.write_text(_LITELLM % upstream)
        argv = [programs / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
        # It checks no keys then, which costs it least.
        open_to_all = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
        found.append(Subject("LiteLLM", port, [*map(str, argv)], open_to_all))
    for peer in options.peer:
        name, _, command = peer.partition("=")
        port = free_port()
        argv = shlex.split(command.replace("{port}", str(port)).replace("{upstream}", str(upstream)))
        found.append(Subject(name, port, argv))
    return found


@contextmanager
def running(subject: Subject) -> Iterator[None]:
    if subject.argv is None:
        yield
        return
    environment = os.environ | subject.environment
    with subprocess.Popen(subject.argv, stdout=subprocess.DEVNULL, env=environment) as subject.process:
        try:
            yield
        finally:
            subject.process.terminate()
            try:
                subject.process.wait(10)
            except subprocess.TimeoutExpired:
                subject.process.kill()  # An overloaded one may see its requests out for minutes.


async def until_ready(subject: Subject) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        tally = Tally()
        try:
            tally = await load(subject.port, "mock", requests=1, concurrent=1, stream=False)
        except OSError as error:
            tally.errors.append(str(error))
        if not tally.errors:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"{subject.name} does not answer: {tally.errors[-1]}")
        await asyncio.sleep(0.2)


async def _cell(subject: Subject, requests: int, concurrent: int, limit_s: float, *, stream: bool) -> dict[str, Any]:
    before = subject.cpu_s()
    started = time.perf_counter()
    tally = await load(subject.port, "mock", requests=requests, concurrent=concurrent, stream=stream, limit_s=limit_s)
    wall_s = time.perf_counter() - started
    cpu_s = subject.cpu_s() - before
    return {
        "concurrent": concurrent,
        "stream": stream,
        "requests": len(tally.whole_s),
        "errors": len(tally.errors),
        "first_error": tally.errors[0] if tally.errors else None,
        "wall_s": wall_s,
        "cpu_ms_per_request": 1e3 * cpu_s / max(1, len(tally.whole_s)),
        "p50_ms": 1e3 * median(tally.whole_s) if tally.whole_s else None,
        "p99_ms": 1e3 * quantiles(tally.whole_s, n=100)[98] if len(tally.whole_s) > 1 else None,
        "first_byte_p50_ms": 1e3 * median(tally.first_byte_s) if tally.first_byte_s else None,
        "memory_mb": subject.memory_mb(),
    }


async def measure(subject: Subject, options: argparse.Namespace) -> None:
    """All loads on one subject."""
    await until_ready(subject)
    subject.idle_mb = subject.memory_mb()
    for concurrent in options.concurrent:
        # Connections are made and code is warm before anything is counted.
        await load(subject.port, "mock", requests=2 * concurrent, concurrent=concurrent, stream=False, limit_s=60)
        whole, streamed = max(options.requests, 2 * concurrent), max(options.requests // 50, concurrent)
        if concurrent == 1:
            streamed = min(streamed, 5)  # One after the other, two seconds each.
        subject.cells.append(await _cell(subject, whole, concurrent, options.limit_s, stream=False))
        subject.cells.append(await _cell(subject, streamed, concurrent, options.limit_s, stream=True))
    if options.streams and subject.name not in options.without_streams:
        subject.cells.append(await _cell(subject, options.streams, options.streams, options.limit_s, stream=True))


def per_chunk_us(whole: dict[str, Any], streamed: dict[str, Any]) -> float | None:
    """None where something went wrong: what an error costs is no chunk's."""
    if whole["errors"] or streamed["errors"]:
        return None
    more_ms: float = streamed["cpu_ms_per_request"] - whole["cpu_ms_per_request"]
    return 1e3 * more_ms / CHUNKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrent", nargs="+", type=int, default=[1, 16, 64, 512])
    parser.add_argument("--requests", type=int, default=1000, help="for each load; a fiftieth where streamed")
    parser.add_argument("--streams", type=int, default=1000, help="streams at once, at the end; 0 for none")
    parser.add_argument(
        "--without-streams", nargs="*", default=["FastAPI + httpx", "LiteLLM"], help="subjects spared of them"
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each load; what is late counts as an error")
    parser.add_argument("--peers", type=Path, help="a virtual environment with litellm[proxy] and vllm-router")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND with {port} and {upstream}")
    parser.add_argument("--name", default="gateway", help="of the file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.concurrent, options.requests, options.streams = [1, 16], 100, 100
    upstream = subprocess.Popen([sys.executable, "-m", "benchmarks.http_upstream"], stdout=subprocess.PIPE, text=True)
    assert upstream.stdout is not None
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = subjects(int(upstream.stdout.readline()), options, Path(folder))
            for subject in found:
                with running(subject):
                    asyncio.run(measure(subject, options))
    finally:
        upstream.terminate()
        upstream.wait()
    rows = []
    for subject in found:
        for whole, streamed in zip(subject.cells[::2], subject.cells[1::2], strict=False):
            cells = [whole["concurrent"], whole["cpu_ms_per_request"], per_chunk_us(whole, streamed), whole["p50_ms"]]
            cells += [whole["p99_ms"], streamed["first_byte_p50_ms"], subject.idle_mb]
            rows.append([subject.name, *cells, whole["errors"] + streamed["errors"]])
        if len(subject.cells) % 2:
            many = subject.cells[-1]
            name = f"{subject.name}, {many['concurrent']} streams"
            rows.append([name, *[""] * 6, many["memory_mb"], many["errors"]])
    head = ["subject", "at once", "CPU ms", "us a chunk", "p50 ms", "p99 ms", "first byte ms", "MB", "errors"]
    peers = [peer.partition("=")[0] for peer in options.peer]
    result = circumstances(threads=1) | {"load": vars(options) | {"peer": peers, "peers": options.peers is not None}}
    result["subjects"] = [{"name": s.name, "idle_mb": s.idle_mb, "cells": s.cells} for s in found]
    written = write(options.name, result)
    print_table("What a gateway adds (CPU of its process; latencies as the client sees them)", head, rows)
    print(f"\n{written}")


if __name__ == "__main__":
    main()
