"""Engines as processes, killed and stopped in mid-stream: the answer is the undisturbed one, byte for byte."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Gateway, launch_models
from test_cli import ENV, free_ports

from gateway.models_file import ModelConfig
from tests.backend.tiny_gguf import write_gguf

TOKENS = 200
KEYS = {"llama.context_length": 512, "tokenizer.chat_template": "{{ messages[0].content }}"}


class EngineProcess:
    """One engine, which can be started again on the same port."""

    def __init__(self, model: Path, port: int) -> None:
        self._model = model
        self._port = port
        self.url = f"http://127.0.0.1:{port}"

    def start(self, dtype: str = "bfloat16") -> None:
        argv = [sys.executable, "-m", "backend.server", "--model", str(self._model), "--port", str(self._port)]
        env = {**ENV, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen([*argv, "--dtype", dtype, "--kv-bytes", str(1 << 22)], env=env)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    model = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", KEYS)
    engines = [EngineProcess(model, port) for port in free_ports(2)]
    for engine in engines:
        engine.start()
    yield engines
    for engine in engines:
        engine.kill()


async def stream(gateway: Gateway, then: Callable[[], None] | None = None, after: int = 0) -> list[str]:
    """The events of a verified answer; `then` happens once so many of them have come."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "is_deterministic": True,
        "temperature": 1,
        "seed": 7,
        "logprobs": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    events: list[str] = []
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            events.append(line.removeprefix("data: "))
            if then is not None and len(events) == after:
                then()
    return [event if event == "[DONE]" else json.dumps({**json.loads(event), "created": 0}) for event in events]


async def until_well(gateway: Gateway) -> None:
    (group,) = gateway.models.groups
    while not all(replica.well for replica in group.replicas):
        await gateway.check()
        await asyncio.sleep(0.1)


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
