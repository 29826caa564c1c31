"""What the command line says of itself: versions, examples, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_asks_the_command_itself(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_VERBATIM_COMPLETE={shell}_complete" in result.output


def test_commands_and_flags_are_completed() -> None:
    def complete(words: str, index: int) -> set[str]:
        env = os.environ | {"_VERBATIM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        argv = [sys.executable, "-c", "from gateway.cli import main; main(prog_name='verbatim')"]
        done = subprocess.run(argv, env=env, cwd=ROOT, text=True, capture_output=True, check=True)
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert complete("verbatim g", 1) == {"gateway"}
    assert "--log-format" in complete("verbatim gateway --log", 2)
    assert complete("verbatim gateway --log-format ", 3) == {"text", "json"}


def test_version_and_examples() -> None:
    assert version("verbatim") in CliRunner().invoke(main, ["--version"]).output
    for command in ([], ["up"], ["demo"], ["gateway"]):
        said = CliRunner().invoke(main, [*command, "--help"]).output
        assert re.search(r"Examples:\n +verbatim ", said)
