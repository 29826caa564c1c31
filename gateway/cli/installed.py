"""Whether what a backend runs on is installed, said in one line before anything starts.

The gateway alone needs no model library, so an installation may lack them. Looks, and imports nothing. An interpreter
that is not ours (VERBATIM_SGLANG_PYTHON) is not looked into: its own error says what it lacks.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

NEEDS = {"engine": ("torch", "gguf", "safetensors"), "sglang": ("sglang",)}
"""What each kind of backend cannot start without; the extra that brings it has the kind's name."""


def require(kind: str, interpreter: str) -> None:
    """Raises `ClickException` where `interpreter` is ours and lacks what a backend of this kind needs."""
    missing = [name for name in NEEDS[kind] if interpreter == sys.executable and find_spec(name) is None]
    if missing:
        raise click.ClickException(f"{', '.join(missing)} not installed: install Verbatim with the extra '{kind}'")
