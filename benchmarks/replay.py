"""What does it take to compute an answer again from its receipt, beside generating it?

Two engines of the same model and a gateway before the first, as processes. Each round generates one answer through the
gateway and replays its receipt on the second engine, which has never seen it: no KV of it is cached. The clocks are
round the client's request, and round all that `verbatim replay` does but to start Python. CPU is the engine's, as the
kernel tells.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.parts import parser, save, shape
from benchmarks.ports import free_port
from benchmarks.report import circumstances, print_table
from gateway.backends.client import BackendClient
from gateway.http.client import HttpClient
from gateway.receipts.key_files import write_new_key
from gateway.receipts.receipt import parse
from gateway.receipts.replay import replay

TARGET = 5.0
POLICY = """version: 1
anonymous: a
tenants: {a: {}}
defaults: {determinism: {mode: verified}, receipts: {mode: always}}
"""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Round:
    """One answer: generated, and replayed."""

    tokens: int
    generated_s: float
    generated_cpu_s: float
    replayed_s: float
    replayed_cpu_s: float


class Engine:
    """An engine as a process."""

    def __init__(self, stack: ExitStack, dtype: str, options: argparse.Namespace) -> None:
        groups, window = options.shape
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "backend.server", "--port", str(port), "--dtype", dtype]
        argv += ["--device", options.device, "--kv-bytes", str(options.kv_bytes)]
        argv += ["--verify-groups", str(groups), "--verify-window", str(window)]
        self._process = _start(stack, argv)

    def wait_ready(self) -> None:
        """Raises `SystemExit` where it never will be."""
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as http:
            while True:
                try:
                    if http.get("/healthz").is_success:
                        return
                except httpx.ConnectError:
                    pass
                if self._process.poll() is not None:
                    raise SystemExit("an engine ended")
                time.sleep(0.2)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S


def measure(dtype: str, options: argparse.Namespace) -> list[Round]:
    """All rounds in one dtype."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "policy.yaml").write_text(POLICY)
        write_new_key(folder / "keys", datetime.now(UTC))
        first, second = (Engine(stack, dtype, options) for _ in range(2))
        argv = [sys.executable, "-m", "gateway.cli", "gateway", "--backend", first.url, "--port", "0"]
        argv += ["--policy", str(folder / "policy.yaml"), "--receipt-keys", str(folder / "keys")]
        for engine in (first, second):
            engine.wait_ready()
        said = _start(stack, argv).stdout
        assert said is not None
        gateway = said.readline().split()[-1]
        # Not counted: whatever is done once.
        asyncio.run(_round(gateway, first, second, number=-1, count=8))
        return [asyncio.run(_round(gateway, first, second, n, options.tokens)) for n in range(options.rounds)]


async def _round(gateway: str, first: Engine, second: Engine, number: int, count: int) -> Round:
    async with httpx.AsyncClient(base_url=gateway, trust_env=False, timeout=_TIMEOUT_S) as http:
        model = (await http.get("/models")).json()["data"][0]["id"]
        question = f"Tell the story of the lighthouse keeper's {number + 2} cats, and leave nothing out."
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}], "seed": number}
        cpu_s, begun = first.cpu_s(), time.perf_counter()
        answer = await http.post("/chat/completions", json=body | {"max_tokens": count, "ignore_eos": True})
        generated_s, generated_cpu_s = time.perf_counter() - begun, first.cpu_s() - cpu_s
        answer.raise_for_status()
        receipt = await http.get(f"/receipts/{answer.headers['x-verbatim-receipt']}")
    cpu_s, begun = second.cpu_s(), time.perf_counter()
    async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=_TIMEOUT_S) as backend_http:
        client = BackendClient(backend_http, second.url, _TIMEOUT_S)
        said = parse(receipt.content).statement.answer
        prompts = [prompt.tokens or () for prompt in said.prompts]
        difference = await replay(client, await client.info(), said, prompts)
    replayed_s, replayed_cpu_s = time.perf_counter() - begun, second.cpu_s() - cpu_s
    if difference is not None:
        raise SystemExit(f"the answer is not the same: {difference}")
    return Round(len(said.choices[0].tokens), generated_s, generated_cpu_s, replayed_s, replayed_cpu_s)


def _start(stack: ExitStack, argv: list[str]) -> subprocess.Popen[str]:
    """Start a process that ends with the run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VERBATIM_ACCESS_LOG": "false"}
    process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment))
    stack.callback(process.terminate)
    return process


def main() -> None:
    arguments = parser(__doc__, "replay")
    arguments.add_argument("--tokens", type=int, default=512, help="of each answer")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--shape", type=shape, default=(8, 32), help="GxW of a verify pass")
    options = arguments.parse_args()
    if options.quick:
        options.tokens, options.rounds = 96, 1
    measurements, rows = [], []
    for dtype in options.dtypes:
        rounds = measure(dtype, options)
        wall = median(one.generated_s / one.replayed_s for one in rounds)
        cpu = median(one.generated_cpu_s / one.replayed_cpu_s for one in rounds)
        measurements.append(
            {"dtype": dtype, "wall_ratio": wall, "cpu_ratio": cpu, "rounds": [asdict(one) for one in rounds]}
        )
        generated, replayed = (median(getattr(one, name) for one in rounds) for name in ("generated_s", "replayed_s"))
        rows.append([dtype, rounds[0].tokens, generated, replayed, wall, cpu])
    given = {key: value for key, value in vars(options).items() if key != "part"}
    target = f"wall_ratio and cpu_ratio of at least {TARGET:g}"
    result = circumstances(threads=1, device=options.device) | {"options": given, "target": target}
    head = ["", "tokens", "generated s", "replayed s", "times faster", "times less CPU"]
    print_table("Computing an answer again from its receipt", head, rows)
    missed = [one["dtype"] for one in measurements if min(one["wall_ratio"], one["cpu_ratio"]) < TARGET]
    print(f"at least {TARGET:g} times: {'met' if not missed else 'missed in ' + ', '.join(missed)}")
    print(f"\n{save(options, result | {'measurements': measurements})}")


if __name__ == "__main__":
    main()
