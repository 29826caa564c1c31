"""A real engine behind the commit log: what it goes on with, or verifies again, has the bits of one piece."""

from __future__ import annotations

import json
from typing import Any

from engine_process import EngineProcess
from launched import Gateway, launch_gateway
from test_cache import policy


async def ask(gateway: Gateway, max_tokens: int, top_logprobs: int) -> tuple[str, Any]:
    fields = {"model": "tiny", "temperature": 1, "seed": 7, "ignore_eos": True, "logprobs": True}
    response = await gateway.chat(**fields, max_tokens=max_tokens, top_logprobs=top_logprobs)
    assert response.status_code == 200, response.text
    return response.headers["x-verbatim-cache"], json.loads(response.text)["choices"]


async def test_logs_gone_on_with_and_replayed_have_the_bits_of_one_piece(engine: EngineProcess) -> None:
    async with (
        launch_gateway(engine.url, policies=policy("{scope: none}")) as plain,
        launch_gateway(engine.url, policies=policy()) as gateway,
    ):
        for max_tokens, top_logprobs, expected in ((37, 0, "lead"), (90, 0, "lead"), (90, 3, "lead"), (120, 2, "lead")):
            status, choices = await ask(gateway, max_tokens, top_logprobs)
            assert (status, choices) == (expected, (await ask(plain, max_tokens, top_logprobs))[1])
            assert await ask(gateway, max_tokens, top_logprobs) == ("hit", choices)
        assert gateway.log.stores.conflicts == 0
