"""What every result holds besides its figures: the code, the machine and the libraries it was measured with.

Also prints tables. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from backend.kernels.linear import multiplies_bfloat16
from backend.settings import Device

RESULTS = Path(__file__).parent / "results"


def circumstances(threads: int, device: Device = "cpu") -> dict[str, Any]:
    """Where and with what a run takes place. `load_average` hints at how much else the machine had to do."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": [line[3:] for line in _git("status", "--porcelain", "--", "backend", "benchmarks").splitlines()],
        "cpu": _cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": multiplies_bfloat16(),
        "gpu": None if device == "cpu" else torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "threads": threads,
    }


def write(name: str, content: dict[str, Any]) -> Path:
    """Write a result as benchmarks/results/<name>.json, over the one before: git keeps the history."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns aligned on the right, the first on the left."""
    cells = [head, *([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n{title}")
    for row in cells:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=RESULTS.parent.parent, capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
