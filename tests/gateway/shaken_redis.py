"""A real Valkey that freezes for a while now and then, or dies and comes back empty."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from redis_process import RedisProcess, redis_process

AWAY_S = 1.0
"""At most so long it is frozen or dead."""


class ShakenRedis:
    """Runs until the context ends; `shaken` counts what was done to it."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._directory = directory
        self._chance = chance
        self._running = ExitStack()
        self.shaken: Counter[str] = Counter()

    def __enter__(self) -> ShakenRedis:
        self._server: RedisProcess = self._running.enter_context(redis_process(self._directory))
        self.url = self._server.url
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()

    async def torment(self, every_s: float) -> None:
        """Shake it for as long as this runs; afterwards it is well."""
        while True:
            await asyncio.sleep(every_s * self._chance.uniform(0.5, 1.5))
            await asyncio.shield(self._freeze() if self._chance.random() < 0.5 else self._restart())

    async def _freeze(self) -> None:
        self.shaken["frozen"] += 1
        self._server.freeze()
        await asyncio.sleep(self._chance.uniform(0, AWAY_S))
        self._server.thaw()

    async def _restart(self) -> None:
        self.shaken["restarted empty"] += 1
        self._running.close()
        await asyncio.sleep(self._chance.uniform(0, AWAY_S))
        port = int(self.url.split(":")[-1].split("/")[0])
        # Starting waits for the server's word, which comes in no time.
        self._server = self._running.enter_context(redis_process(self._directory, port))
