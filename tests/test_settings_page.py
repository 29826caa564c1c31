"""docs/settings.md: made of the code, and complete both ways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click

from gateway.cli import main
from gateway.cli.flags import ENGINE_ALONE, ENGINE_FLAGS, engine_variable, parameters
from gateway.settings import ENV_PREFIX, SETTINGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
VARIABLE = re.compile(rf"(?<!_){ENV_PREFIX}[A-Z0-9_]*[A-Z0-9]")


def test_the_page_is_what_the_code_makes() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [sys.executable, "scripts/settings_page.py"], cwd=ROOT, env=env, capture_output=True, check=True
    )
    assert made.stdout.decode() == PAGE, "run `make reference`"


def test_every_setting_says_what_it_is_for() -> None:
    assert all(re.fullmatch(r"[A-Z].*\.", info.said) for info in SETTINGS.values())
    rows = re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE)
    assert len(rows) > 50
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_variable_in_the_code_is_on_the_page_and_the_other_way_round() -> None:
    source = [
        path.read_text(encoding="utf-8") for folder in ("gateway", "backend") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    named = set(VARIABLE.findall("\n".join(source))) - {"VERBATIM_SOME_FIELD", "VERBATIM_ENGINE"}
    on_page = set(VARIABLE.findall(PAGE))
    assert named - on_page == set()
    engine = map(engine_variable, parameters([*ENGINE_FLAGS, *ENGINE_ALONE]))
    made = {*(info.variable for info in SETTINGS.values()), *engine}
    assert on_page - made - named == set()


def flags_of(command: click.Command) -> set[str]:
    options = [one for one in command.params if isinstance(one, click.Option)]
    own = {flag for one in options for flag in (*one.opts, *one.secondary_opts)}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*map(flags_of, inner))


def test_every_flag_of_every_command_is_on_the_page() -> None:
    flags = flags_of(main) - {"--version"}
    assert len(flags) > 30
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in PAGE] == []


def test_no_document_speaks_of_a_setting_that_there_is_not() -> None:
    """Variables anywhere, flags where a command of ours stands before them."""
    flags = {"--help", *flags_of(main), *re.findall(r"`(--[a-z-]+)`", PAGE)}
    known = set(VARIABLE.findall(PAGE))
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docker-compose*"), ROOT / "Dockerfile"]
    texts += [path for path in ROOT.glob("deploy/**/*") if path.suffix in (".yaml", ".yml", ".md", ".env")]
    assert len(texts) > 10
    wrong = []
    for path in texts:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = set(VARIABLE.findall(line)) - known
            command = re.search(
                r"\bverbatim (?:up|gateway|demo|admin|policy|keys|receipts|replay|backend engine)\b[^`|]*", line
            )
            if command is not None:
                found |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", command[0])) - flags
            wrong += [f"{path.relative_to(ROOT)}:{number}: {name}" for name in sorted(found)]
    assert wrong == []
