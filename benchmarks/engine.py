"""The engine alone beside other servers of the same model: tokens a second and memory.

All continue the same prompts greedily by exactly the same number of tokens, prefill included, from the same weights in
the same dtype, on one thread. Each subject has a process for each dtype and batch, and they take turns, so that noise
hits all. The ratio of CPU time says the same as that of wall time, with less of the noise: the others are asleep.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.parts import save
from benchmarks.report import circumstances, print_table

OTHERS = ("transformers", "continuous", "sglang", "hooked")
"""`generate` of transformers, its continuous batching, stock SGLang, and SGLang with the adapter in it."""
SGLANG_PYTHON = os.environ.get("VERBATIM_SGLANG_PYTHON", ".venv-sglang/bin/python")


class Subject:
    """A process that runs benchmarks.subject."""

    def __init__(self, name: str, dtype: str, kv_bytes: int):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        python = SGLANG_PYTHON if name in ("sglang", "hooked") else sys.executable
        command = [python, "-m", f"benchmarks.subject_{name}", dtype, str(kv_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self._answer()

    def run(self, numbers: list[int], count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps({"numbers": numbers, "count": count}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a subject ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(others: list[str], dtype: str, batch: int, count: int, repetitions: int, kv_bytes: int) -> dict[str, Any]:
    """One batch size in one dtype, all subjects in turn. Ratios are the engine's to another's; above 1 it is faster."""
    names = ["engine", *others]
    subjects = {name: Subject(name, dtype, kv_bytes) for name in names}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repetition in range(repetitions):
        numbers = list(range(repetition * batch, (repetition + 1) * batch))
        # Who goes first alternates too.
        for name in names if repetition % 2 == 0 else reversed(names):
            runs[name].append(subjects[name].run(numbers, count))
    figures: dict[str, Any] = {"dtype": dtype, "concurrent": batch, "new_tokens": count}
    ours = runs["engine"]
    for name, subject in subjects.items():
        subject.close()
        theirs = runs[name]
        pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a["tokens"], b["tokens"], strict=True)]
        figures[name] = subject.facts | {
            "tokens_per_s": batch * count / median(run["wall_s"] for run in theirs),
            "ratio": median(b["wall_s"] / a["wall_s"] for a, b in zip(ours, theirs, strict=True)),
            "cpu_ratio": median(b["cpu_s"] / a["cpu_s"] for a, b in zip(ours, theirs, strict=True)),
            "same_tokens": sum(a == b for a, b in pairs) / len(pairs),
            "wall_s": [run["wall_s"] for run in theirs],
            "cpu_s": [run["cpu_s"] for run in theirs],
            "peak_bytes": max(run["peak_bytes"] for run in theirs),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--others", nargs="+", default=["transformers"], choices=OTHERS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=40, help="new tokens for each request")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kv-bytes", type=int, default=1 << 28, help="the engine's KV memory, resident from the start")
    parser.add_argument("--name", default="engine", help="of the file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work: shows that it runs, not figures")
    options = parser.parse_args()
    if options.quick:
        options.batches, options.tokens, options.repetitions = [2], 8, 1

    result = circumstances(threads=1) | {"measurements": []}
    rows = []
    for dtype in options.dtypes:
        for batch in options.batches:
            figures = measure(options.others, dtype, batch, options.tokens, options.repetitions, options.kv_bytes)
            result["measurements"].append(figures)
            for name in ("engine", *options.others):
                figure = figures[name]
                rows.append(
                    [
                        f"{dtype} x {batch}, {name}",
                        round(figure["tokens_per_s"], 1),
                        *(figure[key] for key in ("ratio", "cpu_ratio", "same_tokens")),
                        *(figure[key] >> 20 for key in ("loaded_bytes", "peak_bytes")),
                    ]
                )
                print(f"{rows[-1][0]}: {figure['ratio']:.2f}", file=sys.stderr)
    head = ["", "tok/s", "ratio", "CPU ratio", "same tokens", "MiB loaded", "MiB peak"]
    print_table("The engine beside others (ratio above 1: the engine is faster than this one)", head, rows)
    print(f"\n{save(options, result)}")


if __name__ == "__main__":
    main()
