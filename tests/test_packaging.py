"""The wheel holds every file of the packages and their data, and the gateway in it needs nothing of the engine."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("backend", "gateway", "policies")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_SHIPPED = {".pyc", ".md"}
FOR_OTHERS = ("torch", "numpy", "gguf", "safetensors", "sglang", "triton", "prometheus_client")
WITHOUT_ENGINE = f"""
import sys
sys.modules.update(dict.fromkeys({FOR_OTHERS[:-1]!r}))  # None: importing it fails, as if it were not installed
from gateway.cli import main
main()
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel made of it, built from a copy: a build leaves files behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: what pip puts on the path."""
    (found,) = dist.glob("*.whl")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(found) as archive:
        archive.extractall(unpacked)
    return unpacked


def shipped(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for package in PACKAGES
        for path in (folder / package).rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    assert shipped(wheel) == shipped(ROOT)
    assert {"policies/policy.schema.json", "policies/examples/chat.yaml"} <= shipped(wheel)
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == set(PACKAGES)


def test_sdist_is_built_beside_it(dist: Path) -> None:
    assert [path.name for path in dist.glob("*.tar.gz")] == [f"verbatim-{PROJECT['version']}.tar.gz"]


def imports(path: Path) -> Iterator[str]:
    """The outermost names of what a module imports when it is imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module.partition(".")[0]


def test_the_gateway_imports_only_what_a_plain_install_brings() -> None:
    """By name, not by what happens to be there: a dependency of a dependency may go away."""
    given = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    given |= {canonicalize_name(name) for name in ("starlette", "anyio")}  # FastAPI's own foundation, pinned by it
    optional = {"opentelemetry": "otel"}
    of = packages_distributions()
    files = [*(ROOT / "gateway").rglob("*.py"), *(ROOT / "policies").rglob("*.py"), ROOT / "backend" / "protocol.py"]
    undeclared = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in imports(path)
        if name not in sys.stdlib_module_names | {*PACKAGES, "__future__"}
        and not {canonicalize_name(distribution) for distribution in of.get(name, ())} & given
        and optional.get(name) not in PROJECT["optional-dependencies"]
    }
    assert not undeclared


def without_engine(wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_ENGINE, *arguments],
        env={"PYTHONPATH": str(wheel), "COLUMNS": "200"},
        cwd=wheel,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("gateway", "--help"),
        ("up", "--help"),
        ("policy", "check", "policies/examples/chat.yaml"),
        ("policy", "schema"),
        ("keys", "new"),
    ],
)
def test_what_needs_no_engine_works_without_one(wheel: Path, arguments: tuple[str, ...]) -> None:
    done = without_engine(wheel, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("up",), "engine"),
        (("demo",), "engine"),
        (("backend", "engine", "--port", "0"), "engine"),
        (("up", "--backend", "sglang"), "sglang"),
        (("backend", "sglang", "--model-path", "x"), "sglang"),
    ],
)
def test_what_needs_one_says_in_a_line_what_to_install(wheel: Path, arguments: tuple[str, ...], extra: str) -> None:
    done = without_engine(wheel, *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"not installed: install Verbatim with the extra '{extra}'")
