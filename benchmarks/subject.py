"""A process whose speed and memory are measured: answers orders on stdin, one JSON line each way.

The first line out tells that the model is loaded. Each order `{"numbers": [...], "count": N}` is answered with figures
about a batch of these prompts, each continued greedily by exactly N tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from backend.engine.checkpoint import Checkpoint
from backend.engine.memory import give_back
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from benchmarks.prompts import Prompts

Generate: TypeAlias = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, count) -> `count` new tokens for each."""
Load: TypeAlias = Callable[[Checkpoint], tuple[Generate, dict[str, Any]]]
"""The loaded subject and what is to be said about it."""


def processes() -> list[int]:
    """This process and all it has started, the parents first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            continue  # It has ended meanwhile.
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory(field: str) -> int:
    """Of all processes' memory in bytes: VmRSS, resident now, or VmHWM, the most since `reset_peak`."""
    total = 0
    for pid in processes():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                total += int(line.split()[1]) * 1024
    return total


def reset_peak() -> None:
    for pid in processes():
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s() -> float:
    """CPU seconds of all processes that still run."""
    ticks = 0
    for pid in processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def serve(load: Load) -> None:
    """Load SmolLM2 and answer orders until stdin ends."""
    torch.set_num_threads(1)
    libraries_bytes = memory("VmRSS")
    started = time.perf_counter()
    prompts, generate, facts = _open(load)
    load_s = time.perf_counter() - started
    generate([prompts[99990], prompts[99991]], 4)
    give_back()
    facts |= {
        "load_s": load_s,
        "libraries_bytes": libraries_bytes,
        "loaded_bytes": memory("VmRSS"),
        "loading_peak_bytes": memory("VmHWM"),
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        batch = [prompts[number] for number in order["numbers"]]
        reset_peak()
        wall, cpu = time.perf_counter(), cpu_s()
        tokens = generate(batch, order["count"])
        answer = {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu, "tokens": tokens}
        print(json.dumps(answer | {"peak_bytes": memory("VmHWM")}), flush=True)


def _open(load: Load) -> tuple[Prompts, Generate, dict[str, Any]]:
    # In a function of its own: the checkpoint must not outlive the loading.
    checkpoint = open_checkpoint(SMOLLM2, lambda share: None)
    return Prompts(checkpoint.tokenizer), *load(checkpoint)
