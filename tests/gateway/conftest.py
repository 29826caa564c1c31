"""A toy backend and a real gateway in front of it, both over TCP in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from engine_process import KEYS, EngineProcess
from launched import Gateway, launch_gateway
from redis_process import RedisProcess, free_port, redis_process
from toy_backend import ToyBackend

from tests.backend.tiny_gguf import write_gguf


@pytest.fixture
async def toy() -> AsyncIterator[ToyBackend]:
    async with ToyBackend() as backend:
        yield backend


@pytest.fixture
async def gateway(toy: ToyBackend) -> AsyncIterator[Gateway]:
    async with launch_gateway(toy.url) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis of the module's own."""
    with redis_process(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of the module's own over a tiny model."""
    model = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", KEYS)
    engine = EngineProcess(model, free_port())
    engine.start()
    yield engine
    engine.kill()
