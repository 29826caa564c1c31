"""Throughput by share of verified traffic, for several verify shapes, as a ratio to no verified traffic at all.

A closed loop on the engine itself (closed_loop.py). "Drafted" drafts and verifies every window; "adaptive" follows the
engine's advice and has windows decoded in the fixed lane where that is cheaper. "All invariant" decodes everything in
the fixed lane's arithmetic: the same bits without drafts, hence also without rollbacks. All engines of a dtype live in
one process and take turns, round by round, so that noise hits all of them; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

from backend.engine.engine import Engine
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from backend.kernels.ops import CPU_FAST, CPU_FIXED
from backend.protocol import Sampling
from backend.settings import Dtype, EngineSettings
from benchmarks.closed_loop import ClosedLoop, Load, Tally, numbered
from benchmarks.prompts import Prompts
from benchmarks.report import circumstances, print_table, write
from policies.policy import window_schedule

_FIRST_WINDOW = 8
_SHARES = (0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of serving and one share of verified requests."""

    way: str
    groups: int
    window: int
    share: float


def cells(shapes: list[tuple[int, int]]) -> list[Cell]:
    first = shapes[0]
    return [
        Cell("off", *first, 0.0),
        *(Cell(f"drafted {groups}x{window}", groups, window, share) for groups, window in shapes for share in _SHARES),
        *(Cell("adaptive", *first, share) for share in _SHARES),
        Cell("all invariant", *first, 0.0),
    ]


def measure(dtype: Dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All cells in one dtype."""
    checkpoint = open_checkpoint(SMOLLM2, lambda share: None)
    prompts = Prompts(checkpoint.tokenizer)
    engines: dict[tuple[int, int, bool], Engine] = {}
    tallies: dict[Cell, list[Tally]] = {cell: [] for cell in cells(options.shapes)}
    number = 0
    for turn in range(options.rounds):
        for cell in list(tallies)[:: 1 if turn % 2 == 0 else -1]:
            key = (cell.groups, cell.window, cell.way == "all invariant")
            if key not in engines:
                settings = EngineSettings(SMOLLM2, dtype, 1, options.kv_bytes, cell.groups, cell.window)
                engines[key] = Engine(checkpoint, settings, lambda share: None, fast=CPU_FIXED if key[2] else CPU_FAST)
                engines[key].start()
            windows = window_schedule(_FIRST_WINDOW, cell.window - 1)
            sampling = Sampling(temperature=options.temperature, seed=1)
            load = Load(cell.share, options.in_flight, options.tokens, windows, sampling, cell.way == "adaptive")
            loop = ClosedLoop(engines[key], numbered(prompts, number), load)
            tallies[cell].append(loop.run(options.warm_up, options.seconds))
            number += 1000
    for engine in engines.values():
        engine.stop()
    fingerprints = sorted({engine.info.fingerprint for engine in engines.values()})
    return {"dtype": dtype, "fingerprints": fingerprints, "cells": _figures(tallies)}


def _figures(tallies: dict[Cell, list[Tally]]) -> list[dict[str, Any]]:
    def speed(runs: list[Tally]) -> float:
        return median(run.tokens / run.wall_s for run in runs)

    def cpu_speed(runs: list[Tally]) -> float:
        return median(run.tokens / run.cpu_s for run in runs)

    base = tallies[next(iter(tallies))]
    figures = []
    for cell, runs in tallies.items():
        counts = [run.counts for run in runs]
        ended = sum(run.verified_completions for run in runs)
        drafted, rolled_back = (sum(getattr(count, name) for count in counts) for name in ("drafted", "rolled_back"))
        figures.append(
            asdict(cell)
            | {
                "tokens_per_s": speed(runs),
                "ratio": speed(runs) / speed(base),
                "cpu_ratio": cpu_speed(runs) / cpu_speed(base),
                "verified_token_share": sum(run.verified_tokens for run in runs) / sum(run.tokens for run in runs),
                "verified_completions": ended,
                "windows_each": sum(count.windows for count in counts) / max(1, ended),
                "rollbacks_each": sum(count.rollbacks for count in counts) / max(1, ended),
                "recomputed_share": rolled_back / max(1, drafted),
                "runs": [asdict(run) for run in runs],
            }
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[(8, 16), (8, 32), (4, 32)], help="GxW, ...")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, for each cell and round")
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kv-bytes", type=int, default=1 << 28)
    parser.add_argument("--name", default="verified_share", help="of the file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="one round, one shape: under two minutes")
    parser.add_argument("--part", choices=["float32", "bfloat16"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.shapes = 1, options.shapes[:1]
    if options.part is not None:
        print(json.dumps(measure(cast(Dtype, options.part), options)))
        return

    result = circumstances(threads=1) | {"load": {key: value for key, value in vars(options).items() if key != "part"}}
    result["measurements"] = []
    rows = []
    # A process for each dtype, with the thread settings that have to stand before torch is loaded.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    for dtype in options.dtypes:
        command = [sys.executable, "-m", "benchmarks.verified_share", *sys.argv[1:], "--part", dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        measurement = json.loads(done.stdout)
        result["measurements"].append(measurement)
        for cell in measurement["cells"]:
            keys = ["tokens_per_s", "ratio", "cpu_ratio", "windows_each", "rollbacks_each", "recomputed_share"]
            rows.append([f"{dtype}, {cell['way']}", f"{cell['share']:.0%}", *(cell[key] for key in keys)])
    head = ["way", "verified", "tok/s", "ratio", "CPU ratio", "windows", "rollbacks", "recomputed"]
    print_table("Throughput by share of verified requests, as a ratio to mode off", head, rows)
    print(f"\n{write(options.name, result)}")


def _shape(text: str) -> tuple[int, int]:
    groups, _, window = text.partition("x")
    return int(groups), int(window)


if __name__ == "__main__":
    main()
