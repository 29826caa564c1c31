"""What the gateway's telemetry costs: CPU for each request and each streamed chunk, beside a gateway without any.

All variants run at the same time over one mock upstream (http_upstream.py) and are loaded in turn, round after round,
so that what else the machine does meets them alike. Figures are the least of the rounds: what others do to caches and
clocks only adds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gateway import Subject, per_chunk_us, until_ready
from benchmarks.http_load import load
from benchmarks.http_upstream import CHUNKS
from benchmarks.ports import free_port
from benchmarks.report import circumstances, print_table, write

VARIANTS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "no telemetry": ("benchmarks.unobserved", ("--no-access-log",), {}),
    "metrics": ("gateway.cli", ("--no-access-log",), {}),
    "metrics, log as text": ("gateway.cli", (), {}),
    "metrics, log as JSON": ("gateway.cli", ("--log-format", "json"), {}),
    "metrics, 1 in 100 traced": (
        "gateway.cli",
        ("--no-access-log", "--traces", "otlp"),
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    ),
}


async def _cpu_ms(subject: Subject, requests: int, concurrent: int, *, stream: bool) -> float:
    before = subject.cpu_s()
    tally = await load(subject.port, "mock", requests=requests, concurrent=concurrent, stream=stream)
    assert not tally.errors, tally.errors[0]
    return 1e3 * (subject.cpu_s() - before) / requests


async def measure(subjects: Sequence[Subject], options: argparse.Namespace) -> None:
    """Load all subjects in turn."""
    for subject in subjects:
        await until_ready(subject)
        await load(subject.port, "mock", requests=options.requests // 2, concurrent=16, stream=False)
    for _ in range(options.rounds):
        for subject in subjects:
            whole = await _cpu_ms(subject, options.requests, 16, stream=False)
            streamed = await _cpu_ms(subject, max(32, options.requests // 50), 32, stream=True)
            subject.cells.append({"whole": whole, "streamed": streamed})


def _row(subject: Subject, base: Subject) -> list[Any]:
    least, others = ({key: min(cell[key] for cell in one.cells) for key in one.cells[0]} for one in (subject, base))
    ratios = [least[key] / others[key] for key in ("whole", "streamed")]
    chunk_us = per_chunk_us({"cpu_ms_per_request": least["whole"]}, {"cpu_ms_per_request": least["streamed"]})
    return [
        subject.name,
        f"{1e3 * least['whole']:.1f}",
        ratios[0],
        f"{1e3 * least['streamed']:.0f}",
        ratios[1],
        chunk_us,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--requests", type=int, default=2000, help="a round; a fiftieth where streamed")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 2, 100
    upstream = subprocess.Popen([sys.executable, "-m", "benchmarks.http_upstream"], stdout=subprocess.PIPE, text=True)
    assert upstream.stdout is not None
    with ExitStack() as stack:
        stack.callback(upstream.terminate)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = folder / "models.yaml"
        url = f"http://127.0.0.1:{int(upstream.stdout.readline())}/v1"
        models.write_text(f"version: 1\nmodels:\n  mock:\n    upstreams:\n      - url: {url}\n")
        subjects = []
        for name, (module, flags, environment) in VARIANTS.items():
            port = free_port()
            argv = [sys.executable, "-m", module, "gateway", "--models", str(models), "--port", str(port), *flags]
            subject = Subject(name, port, argv, environment)
            log = stack.enter_context((folder / f"{port}.log").open("wb"))
            subject.process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | environment)
            stack.callback(subject.process.terminate)
            subjects.append(subject)
        asyncio.run(measure(subjects, options))
    rows = [_row(subject, subjects[0]) for subject in subjects]
    result = circumstances(threads=1) | {"load": vars(options), "chunks": CHUNKS}
    result["subjects"] = [{"name": subject.name, "cells": subject.cells} for subject in subjects]
    written = write("telemetry", result)
    head = ["gateway", "CPU us", "ratio", "CPU us, streamed", "ratio", "us a chunk"]
    print_table(
        "What telemetry costs (CPU of the gateway's process for a request, the least of the rounds)", head, rows
    )
    print(f"\n{written}")


if __name__ == "__main__":
    main()
