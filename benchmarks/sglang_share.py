"""SGLang as a backend: throughput by the share of verified requests, beside SGLang's own endpoint.

A closed loop over HTTP on one server, SmolLM2-135M in float32 on a CPU. "own" asks SGLang's /generate, whose traffic
nothing of ours touches but the hooks; "off" asks /v1/stream; the others have a share of their requests verified by the
gateway's own driver. All take turns, and a figure is the median of the rounds. The same client drives all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any

from backend.engine.open_checkpoint import SMOLLM2
from backend.protocol import Info, Sampling
from benchmarks.engine import SGLANG_PYTHON
from benchmarks.prompts import Prompts
from benchmarks.report import circumstances, print_table, write
from gateway.backends.client import BackendClient
from gateway.domain import Commit, Job
from gateway.driver import run_fast, run_verified
from gateway.dvr import Verifier
from gateway.errors import BackendError
from gateway.http.client import HttpClient, Server

_CELLS = ("own", "off", "10 %", "50 %", "100 %")
_POLL_S = 1.0


class Bench:
    """One server, its client, and the next prompt's number."""

    def __init__(self, backend: BackendClient, http: HttpClient, info: Info, prompts: Prompts, tokens: int):
        self._backend = backend
        self._http = http
        self._info = info
        self._prompts = prompts
        self._tokens = tokens
        self._numbers = count()
        self._produced = 0

    async def measure(self, cell: str, in_flight: int, warm_up_s: float, measured_s: float) -> float:
        """Tokens a second of one cell."""
        share = int(cell.split()[0]) / 100 if cell.endswith("%") else 0.0
        begun = count()

        async def client(place: int) -> None:
            # The first ones are of different lengths, so that they do not end together.
            tokens = max(2, self._tokens * (place + 1) // in_flight)
            while True:
                number = next(begun)
                verified = int((number + 1) * share) > int(number * share)
                ask: Callable[[int], Awaitable[None]] = self._own if cell == "own" else self._fast
                await (self._verified if verified else ask)(tokens)
                tokens = self._tokens

        clients = [asyncio.create_task(client(place)) for place in range(in_flight)]
        await asyncio.sleep(warm_up_s)
        before, started = self._produced, time.perf_counter()
        await asyncio.sleep(measured_s)
        rate = (self._produced - before) / (time.perf_counter() - started)
        for task in clients:
            task.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        for end in ends:
            if not isinstance(end, asyncio.CancelledError):
                raise RuntimeError(f"a client ended: {end!r}")
        return rate

    def _job(self, tokens: int) -> Job:
        prompt = self._prompts[next(self._numbers)]
        return Job(tuple(prompt), Sampling(temperature=0.0), tokens, (), top_logprobs=0)

    async def _verified(self, tokens: int) -> None:
        verifier = Verifier(self._info.fingerprint, self._info.vocab_size)
        windows = (8, self._info.verify.window - 1)
        async for progress in run_verified(self._backend, self._job(tokens), windows, verifier, self._info.roles):
            if isinstance(progress, Commit):
                self._produced += len(progress.tokens)

    async def _fast(self, tokens: int) -> None:
        async for progress in run_fast(self._backend, self._job(tokens), self._info.vocab_size):
            if isinstance(progress, Commit):
                self._produced += len(progress.tokens)

    async def _own(self, tokens: int) -> None:
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": list(self._job(tokens).prompt), "sampling_params": sampling, "stream": True}
        headers = [(b"content-type", b"application/json")]
        server = Server.at(self._backend.url)
        incoming = await self._http.post(server, b"/generate", headers, json.dumps(body).encode())
        try:
            seen, line = 0, b""
            while some := await incoming.read_some():
                *lines, line = (line + some).split(b"\n")
                for complete in lines:
                    if complete.startswith(b"data: {"):
                        total = json.loads(complete[6:])["meta_info"]["completion_tokens"]
                        self._produced += total - seen
                        seen = total
        finally:
            incoming.close()


@contextmanager
def server(port: int, shape: tuple[int, int]) -> Iterator[str]:
    """A SGLang backend for as long as the context lasts; its URL."""
    groups, window = map(str, shape)
    address = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command = [SGLANG_PYTHON, "-m", "backend.sglang.serve", "--model-path", SMOLLM2, *address]
    command += ["--verify-groups", groups, "--verify-window", window]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def run(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cells."""
    async with HttpClient(connect_timeout_s=5, silence_timeout_s=300) as http:
        backend = BackendClient(http, url, call_timeout_s=300)
        while True:
            try:
                info = await backend.info()
                break
            except BackendError:
                await asyncio.sleep(_POLL_S)
        bench = Bench(backend, http, info, Prompts(await backend.tokenizer()), options.tokens)
        rates: dict[str, list[float]] = {cell: [] for cell in _CELLS}
        for number in range(options.rounds):
            for cell in _CELLS if number % 2 == 0 else reversed(_CELLS):
                rates[cell].append(await bench.measure(cell, options.in_flight, options.warm_up, options.seconds))
    ratios = {cell: median(a / b for a, b in zip(rates[cell], rates["own"], strict=True)) for cell in _CELLS}
    figures = [{"cell": cell, "ratio": ratios[cell], "tokens_per_s": rates[cell]} for cell in _CELLS]
    return {"fingerprint": info.fingerprint, "measurements": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=_shape, default=(4, 16), help="GxW")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens for each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured, for each cell and round")
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--port", type=int, default=18045)
    parser.add_argument("--name", default="sglang_share", help="of the file in benchmarks/results")
    options = parser.parse_args()
    load = {key: value for key, value in vars(options).items() if key not in ("name", "port")}
    with server(options.port, options.shape) as url:
        figures = asyncio.run(run(url, options))
    result = circumstances(threads=1) | {"load": load} | figures
    rows = [[row["cell"], median(row["tokens_per_s"]), row["ratio"]] for row in result["measurements"]]
    print_table("SGLang: throughput by share of verified requests", ["", "tok/s", "ratio to its own endpoint"], rows)
    print(f"\n{write(options.name, result)}")


def _shape(text: str) -> tuple[int, int]:
    groups, _, window = text.partition("x")
    return int(groups), int(window)


if __name__ == "__main__":
    main()
