"""Engines as processes over a tiny random model, to be killed and started again, and a verified stream through them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launched import Gateway

ROOT = Path(__file__).parents[2]
KEYS = {"llama.context_length": 512, "tokenizer.chat_template": "{{ messages[0].content }}"}
"""Of the model, for `write_gguf`."""
TOKENS = 200


class EngineProcess:
    """One engine, which can be started again on the same port."""

    def __init__(self, model: Path, port: int) -> None:
        self._model = model
        self._port = port
        self.url = f"http://127.0.0.1:{port}"

    def start(self, dtype: str = "bfloat16") -> None:
        argv = [sys.executable, "-m", "backend.server", "--model", str(self._model), "--port", str(self._port)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen([*argv, "--dtype", dtype, "--kv-bytes", str(1 << 22)], env=env)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


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
    """Look after the replicas until all are well; what was known of them before does not count."""
    (group,) = gateway.models.groups
    await gateway.check()
    while not all(replica.well for replica in group.replicas):
        await asyncio.sleep(0.1)
        await gateway.check()
