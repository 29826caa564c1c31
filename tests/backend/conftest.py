"""The real model, the two numerics, and a clean number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backend.engine.checkpoint import Checkpoint
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from backend.settings import Dtype


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    return open_checkpoint(SMOLLM2, lambda share: None)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Dtype:
    value: Dtype = request.param
    return value


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
