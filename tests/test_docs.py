"""What README and docs show: commands have the flags they are given, files load, examples run, links lead somewhere.

Blocks behind `<!-- not run -->` need what a test has not (an installation, containers, a GPU); their commands are
looked at all the same.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from backend.server.__main__ import main as engine
from gateway.cli import main as verbatim
from gateway.cli.flags import load_config
from gateway.models_file import load_models
from policies.loader import load_policy
from tests.up_process import up_process

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(<!-- (?P<mark>[\w ]+) -->\n\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
GATEWAY = "http://127.0.0.1:8042"
DIGEST = "sha256:" + "0" * 32 + ":" + "0" * 64


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    mark: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def found() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("text"))
            yield Block(page.name, line, match["language"], match["mark"], match["text"])


BLOCKS = list(found())


def of(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in languages], ids=str)


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell block, without what stands in for something else."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\||;", line):
            words = shlex.split(part, comments=True) if part.count("'") % 2 == 0 else []
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            yield [word.replace("…", "x") for word in words if word != "…" and not re.search(r"[\[\]<>]", word)]


def check_flags(words: list[str]) -> None:
    """Raises `click.UsageError` for a command or a flag that there is not."""
    command: click.Command = verbatim
    path = ["verbatim"]
    context = click.Context(command, info_name="verbatim")
    arguments = words
    while isinstance(command, click.Group):
        # What stands in front of the name are the group's own flags.
        parsed, arguments, _ = command.make_parser(context).parse_args(list(arguments))
        assert parsed is not None
        if not arguments:
            return
        sub = command.get_command(context, arguments[0])
        if sub is None:
            raise click.UsageError(f"{' '.join(path)} has no {arguments[0]}")
        path.append(arguments[0])
        command, arguments = sub, arguments[1:]
        context = click.Context(command, parent=context, info_name=path[-1])
    if path[-2:] == ["backend", "engine"]:
        command = engine
    elif path[-2:] == ["backend", "sglang"]:
        return  # SGLang's own flags
    command.make_parser(click.Context(command)).parse_args(list(arguments))


@of("sh")
def test_commands_have_what_they_are_given(block: Block) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(block.text):
        match words:
            case ["verbatim" | ".venv/bin/verbatim", *arguments]:
                check_flags(arguments)
            case ["make", *named]:
                assert {word for word in named if "=" not in word} <= targets
            case ["docker", "build", *_]:
                assert re.search(rf"AS {words[words.index('--target') + 1]}$", (ROOT / "Dockerfile").read_text(), re.M)
            case ["kubectl", "apply", "-k", folder]:
                assert (ROOT / folder / "kustomization.yaml").is_file()


def test_a_wrong_flag_would_be_seen() -> None:
    for wrong in (["up", "--no-such"], ["admin", "no-such"], ["backend", "engine", "--no-such"]):
        with pytest.raises(click.UsageError):
            check_flags(wrong)


@of("yaml")
def test_yaml_is_understood_by_whom_it_is_for(block: Block, tmp_path: Path) -> None:
    text = re.sub(r"sha256:…(:…)?", DIGEST, block.text)
    if "backends:" in text or "upstreams:" in text:
        assert load_models(text, str(block), {"EXAMPLE_API_KEY": "x"})
    elif re.search(r"^(gateway|engine):", text, re.M):
        (tmp_path / "verbatim.yaml").write_text(text)
        assert load_config(tmp_path / "verbatim.yaml")
    elif block.page == "policies.md":  # whose blocks are parts of one file
        parts = [other.text for other in BLOCKS if other.page == block.page and other.language == "yaml"]
        assert load_policy(re.sub(r"sha256:…(:…)?", DIGEST, "\n".join(parts)), str(block))
    else:
        assert load_policy(text, str(block))


@of("json")
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """`verbatim up` as in the quick start, with the small model."""
    with up_process() as running:
        yield running


@of("python")
def test_python_runs(block: Block, url: str) -> None:
    """What asks a gateway; other programs have tests of their own, beside what they are about."""
    program = block.text.replace(GATEWAY, url)
    compile(program, str(block), "exec")
    if url in program:
        subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


CURLS = [block for block in BLOCKS if block.language == "sh" and block.text.startswith("curl " + GATEWAY)]


@pytest.mark.parametrize("block", CURLS, ids=str)
def test_requests_are_answered(block: Block, url: str) -> None:
    script = "set -e\n" + block.text.replace("curl ", "curl --silent --show-error --fail ").replace(GATEWAY, url)
    first, second = (
        subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True, text=True).stdout for _ in range(2)
    )
    assert json.loads(first)["choices"] == json.loads(second)["choices"]


def test_the_quick_start_has_a_request() -> None:
    assert CURLS


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(argv, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "concepts" / "index.html").is_file()


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- \[\d{4}\]\(([^)]+)\) (.+)$", (folder / "README.md").read_text(), re.MULTILINE)
    titles = [(path.name, path.read_text().splitlines()[0][len("# 0000 ") :]) for path in sorted(folder.glob("0*.md"))]
    assert listed == titles


def test_the_performance_page_is_what_the_results_make() -> None:
    made = subprocess.run([sys.executable, "scripts/performance_page.py"], cwd=ROOT, capture_output=True, check=True)
    assert made.stdout.decode() == (ROOT / "docs" / "performance.md").read_text(), "run `make reference`"


def test_tests_and_files_that_are_named_are_there() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)`", text)) <= tests, page.name
        for path in re.findall(r"`((?:benchmarks|deploy|scripts|docs|policies|backend|gateway)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
