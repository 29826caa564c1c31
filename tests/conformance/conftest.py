"""A gateway as a process of its own, over a toy model that repeats what it was told: tests/gateway/toy_gateway.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    command = [sys.executable, str(ROOT / "tests/gateway/toy_gateway.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()  # there is nothing to finish
