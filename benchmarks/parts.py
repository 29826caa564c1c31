"""What the benchmarks of this engine share: their options, a process for each dtype, and how an engine is built."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

from backend.engine.checkpoint import Checkpoint
from backend.engine.engine import Engine
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from backend.settings import Device, Dtype, EngineSettings
from benchmarks.report import circumstances, write

Shape: TypeAlias = tuple[int, int]
"""G x W of a verify pass."""


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    result.add_argument("--device", default="cpu", choices=get_args(Device))
    result.add_argument("--kv-bytes", type=int, default=1 << 30)
    result.add_argument("--name", default=name, help="of the file in benchmarks/results")
    result.add_argument("--quick", action="store_true", help="a fraction of the work: shows that it runs, not figures")
    result.add_argument("--part", choices=["float32", "bfloat16"], help=argparse.SUPPRESS)
    return result


def in_processes(
    module: str, options: argparse.Namespace, measure: Callable[[Dtype, argparse.Namespace], dict[str, Any]]
) -> dict[str, Any] | None:
    """Measure each dtype in a process of its own, which runs the same module again. None within such a process.

    The thread settings have to stand before torch is loaded.
    """
    if options.part is not None:
        print(json.dumps(measure(cast(Dtype, options.part), options)))
        return None
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    measurements = []
    result = circumstances(threads=1, device=options.device)
    for dtype in options.dtypes:
        command = [sys.executable, "-m", module, *sys.argv[1:], "--part", dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        measurements.append({"dtype": dtype} | json.loads(done.stdout))
    given = {key: value for key, value in vars(options).items() if key != "part"}
    return result | {"options": given, "measurements": measurements}


def save(options: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Write a result; one of a quick run stays apart from the real one, and out of git."""
    return write(f"{options.name}.quick" if options.quick else options.name, result)


def smollm2() -> Checkpoint:
    """The model that all figures are of."""
    return open_checkpoint(SMOLLM2, lambda share: None)


def build_engine(checkpoint: Checkpoint, dtype: Dtype, options: argparse.Namespace, shape: Shape) -> Engine:
    """An engine, not started."""
    settings = EngineSettings(checkpoint.config.name, dtype, 1, options.kv_bytes, *shape, device=options.device)
    return Engine(checkpoint, settings, lambda share: None)


def shape(text: str) -> Shape:
    """Parse "GxW"; also "PxO", a workload's prompt and output lengths."""
    first, _, second = text.partition("x")
    return int(first), int(second)
