"""The backends under contract, each started once: the embedded engine always, SGLang where it is installed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from backend.engine.checkpoint import ModelConfig
from backend.engine.open_checkpoint import open_checkpoint
from backend.sglang.hf_folder import write_hf_folder
from tests.contract.backends import SGLANG_PYTHON, Backend, engine_command, sglang_command
from tests.contract.tiny import contract_checkpoint

MODEL = os.environ.get("VERBATIM_CONTRACT_MODEL")
"""A model for `open_checkpoint` instead of the tiny random one."""
KINDS = (
    "engine",
    pytest.param("sglang", marks=pytest.mark.sglang),
    # Two tensor-parallel ranks, which have to stay alike.
    pytest.param("sglang-tp2", marks=pytest.mark.sglang),
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    """A folder that every backend reads."""
    checkpoint = contract_checkpoint() if MODEL is None else open_checkpoint(MODEL, lambda share: None)
    folder = tmp_path_factory.mktemp("contract") / "model"
    write_hf_folder(checkpoint, folder)
    return folder, checkpoint.config


@pytest.fixture(scope="session", params=KINDS)
def backend(
    request: pytest.FixtureRequest, model: tuple[Path, ModelConfig], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    folder, config = model
    if request.param == "engine":
        command = engine_command(folder, 2 * 4 * config.layers * config.kv_heads * config.head_dim)
    elif SGLANG_PYTHON.is_file():
        command = sglang_command(folder, tensor_parallel=2 if request.param == "sglang-tp2" else 1)
    else:
        pytest.skip(f"SGLang is not installed: there is no {SGLANG_PYTHON}")
    backend = Backend(command, tmp_path_factory.mktemp("log") / f"{request.param}.log")
    yield backend
    backend.stop()


@pytest.fixture
async def client(backend: Backend) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=backend.url, timeout=300, limits=limits, trust_env=False) as client:
        yield client
