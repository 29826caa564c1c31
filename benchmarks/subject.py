"""A process whose speed and memory are measured: answers orders on stdin, one JSON line each way.

The first line out tells that the model is loaded. Each order `{"numbers": [...], "count": N}` is answered with figures
about a batch of these prompts, each continued greedily by exactly N tokens.
"""

from __future__ import annotations

import json
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


def memory(field: str) -> int:
    """A field of this process's memory in bytes: VmRSS, resident now, or VmHWM, the most since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


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
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = generate(batch, order["count"])
        answer = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "tokens": tokens}
        print(json.dumps(answer | {"peak_bytes": memory("VmHWM")}), flush=True)


def _open(load: Load) -> tuple[Prompts, Generate, dict[str, Any]]:
    # In a function of its own: the checkpoint must not outlive the loading.
    checkpoint = open_checkpoint(SMOLLM2, lambda share: None)
    return Prompts(checkpoint.tokenizer), *load(checkpoint)
