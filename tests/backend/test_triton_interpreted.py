"""Runs the tests that need Triton's interpreter, in a process where kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

_TESTS = Path(__file__).with_name("triton_ops")


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in _TESTS.glob("test_*.py")))
def test_the_kernels_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(_TESTS / file)]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout + result.stderr
