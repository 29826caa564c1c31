"""`verbatim demo --backend sglang`, as a user starts it: a gateway in front of a real SGLang with the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.backends import REPOSITORY, SGLANG_PYTHON


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_proves_its_point_on_sglang(tmp_path: Path) -> None:
    if not SGLANG_PYTHON.is_file():
        pytest.skip(f"SGLang is not installed: there is no {SGLANG_PYTHON}")
    plan = ["--prompts", "3", "--loads", "1,5", "--tokens", "16", "--temperature", "0.8"]
    shape = ["--verify-groups", "4", "--verify-window", "16"]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "demo", "--backend", "sglang", *plan, *shape, "--json", str(report)],
        cwd=REPOSITORY,
        env=os.environ | {"VERBATIM_SGLANG_PYTHON": str(SGLANG_PYTHON), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    off, verified = json.loads(report.read_text())["runs"]
    assert verified["prompts_with_one_answer_bitwise"] == verified["prompts"] == 3
    assert off["prompts_with_one_answer_bitwise"] < 3, "unverified answers were all alike: this proves nothing"
