"""A server that the adapter would serve wrong does not start, and says which flag is at fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backend.sglang.hf_folder import write_hf_folder
from tests.contract.backends import REPOSITORY, SGLANG_PYTHON, sglang_command
from tests.contract.tiny import contract_checkpoint


@pytest.mark.sglang
@pytest.mark.parametrize("flags", [("--page-size", "16"), ("--disable-radix-cache",)])
def test_a_flag_that_the_adapter_does_not_serve_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    if not SGLANG_PYTHON.is_file():
        pytest.skip(f"SGLang is not installed: there is no {SGLANG_PYTHON}")
    write_hf_folder(contract_checkpoint(), tmp_path / "model")
    command = [*sglang_command(tmp_path / "model", tensor_parallel=1), *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert f"FenceError: {flags[0]}" in done.stdout + done.stderr
