"""The engine alone beside `generate` of transformers: tokens a second and memory.

Both continue the same prompts greedily by exactly the same number of tokens, prefill included, from the same weights in
the same dtype, on one thread. Each subject has a process for each dtype and batch, and both take turns, so that noise
hits both. The ratio of CPU time says the same as that of wall time, with less of the noise: one of the two is asleep.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.report import circumstances, print_table, write

SUBJECTS = ("engine", "transformers")


class Subject:
    """A process that runs benchmarks.subject."""

    def __init__(self, name: str, dtype: str, kv_bytes: int):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", f"benchmarks.subject_{name}", dtype, str(kv_bytes)]
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


def measure(dtype: str, batch: int, count: int, repetitions: int, kv_bytes: int) -> dict[str, Any]:
    """One batch size in one dtype, both subjects in turn."""
    subjects = {name: Subject(name, dtype, kv_bytes) for name in SUBJECTS}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SUBJECTS}
    for repetition in range(repetitions):
        numbers = list(range(repetition * batch, (repetition + 1) * batch))
        # Who goes first alternates too.
        for name in SUBJECTS if repetition % 2 == 0 else SUBJECTS[::-1]:
            runs[name].append(subjects[name].run(numbers, count))
    figures: dict[str, Any] = {"dtype": dtype, "concurrent": batch, "new_tokens": count}
    for name, subject in subjects.items():
        subject.close()
        figures[name] = subject.facts | {
            "tokens_per_s": batch * count / median(run["wall_s"] for run in runs[name]),
            "wall_s": [run["wall_s"] for run in runs[name]],
            "cpu_s": [run["cpu_s"] for run in runs[name]],
            "peak_bytes": max(run["peak_bytes"] for run in runs[name]),
        }
    ours, theirs = (runs[name] for name in SUBJECTS)
    figures["ratio"] = figures["engine"]["tokens_per_s"] / figures["transformers"]["tokens_per_s"]
    figures["cpu_ratio"] = median(run["cpu_s"] for run in theirs) / median(run["cpu_s"] for run in ours)
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a["tokens"], b["tokens"], strict=True)]
    figures["same_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=40, help="new tokens for each request")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kv-bytes", type=int, default=1 << 28, help="the engine's KV memory, resident from the start")
    parser.add_argument("--name", default="engine", help="of the file in benchmarks/results")
    options = parser.parse_args()

    result = circumstances(threads=1) | {"measurements": []}
    rows = []
    for dtype in options.dtypes:
        for batch in options.batches:
            figures = measure(dtype, batch, options.tokens, options.repetitions, options.kv_bytes)
            result["measurements"].append(figures)
            ours, theirs = figures["engine"], figures["transformers"]
            rows.append(
                [
                    dtype,
                    batch,
                    *(round(subject["tokens_per_s"], 1) for subject in (ours, theirs)),
                    *(figures[key] for key in ("ratio", "cpu_ratio", "same_tokens")),
                    *(subject["loaded_bytes"] >> 20 for subject in (ours, theirs)),
                    *(subject["peak_bytes"] >> 20 for subject in (ours, theirs)),
                ]
            )
            print(f"{dtype} x {batch}: {figures['ratio']:.2f}", file=sys.stderr)
    head = ["dtype", "concurrent", "engine tok/s", "transformers tok/s", "ratio", "CPU ratio", "same tokens"]
    head += ["engine MiB loaded", "transformers", "engine MiB peak", "transformers"]
    print_table("Engine beside transformers.generate (ratio above 1: the engine is faster)", head, rows)
    print(f"\n{write(options.name, result)}")


if __name__ == "__main__":
    main()
