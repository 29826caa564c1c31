"""The whole stack as a user starts it: `verbatim demo` on the real model, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_proves_its_point(dtype: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    plan = ["--prompts", "4", "--loads", "1,6", "--tokens", "24", "--temperature", "0.8", "--dtype", dtype]
    command = [sys.executable, "-m", "gateway.cli", "demo", *plan, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    off, verified = json.loads(report.read_text())["runs"]
    assert off["fingerprints"] == verified["fingerprints"] and len(verified["fingerprints"]) == 1
    assert (off["mode"], verified["mode"]) == ("off", "verified")
    assert verified["prompts_with_one_answer_bitwise"] == verified["prompts"] == 4
    assert verified["answers"] == 12 and verified["windows"] > 0
    assert off["prompts_with_one_answer_bitwise"] < 4, "unverified answers were all alike: this proves nothing"
    assert "no two answers to a prompt differ" in done.stdout
