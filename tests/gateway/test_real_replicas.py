"""Engines as processes, killed and stopped in mid-stream: the answer is the undisturbed one, byte for byte."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator

import pytest
from engine_process import KEYS, EngineProcess, stream, until_well
from launched import launch_models
from test_cli import free_ports

from gateway.models_file import ModelConfig
from tests.backend.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    model = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", KEYS)
    engines = [EngineProcess(model, port) for port in free_ports(2)]
    for engine in engines:
        engine.start()
    yield engines
    for engine in engines:
        engine.kill()


async def test_answers_survive_their_engines(engines: list[EngineProcess]) -> None:
    first, second = engines
    config = ModelConfig("tiny", (first.url, second.url))
    async with launch_models((config,), health_timeout_s=2.0) as gateway:
        await until_well(gateway)
        (group,) = gateway.models.groups
        expected = await stream(gateway)
        assert expected[-1] == "[DONE]"
        assert len(expected) > 10

        # Killed: what is in flight goes on at the other one.
        assert await stream(gateway, first.kill, random.randrange(1, len(expected) - 3)) == expected
        first.start("float32")
        while group.replicas[0].belongs:
            await gateway.check()
            await asyncio.sleep(0.1)
        assert "its fingerprint is" in str(group.replicas[0].trouble)
        assert await stream(gateway) == expected, "by the one left"

        # Stopped: it says nothing any more, until the health checks give it up.
        first.kill()
        first.start()
        await until_well(gateway)
        streaming = asyncio.create_task(stream(gateway, lambda: first.signal(signal.SIGSTOP), after=4))
        while not streaming.done():
            await gateway.check()
            await asyncio.sleep(0.1)
        assert await streaming == expected
        assert group.replicas[0].trouble == "it does not answer"
        first.signal(signal.SIGCONT)
        await until_well(gateway)

        # Both dead: the stream says so, and does not look complete.
        broken = await stream(gateway, lambda: [engine.kill() for engine in engines] and None, after=4)
        assert broken[:4] == expected[:4]
        assert json.loads(broken[-1])["error"]["code"] in ("backend_failed", "backend_unavailable")
