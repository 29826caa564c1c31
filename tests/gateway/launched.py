"""A real gateway over TCP in the test's own event loop, and a client of it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.app import build_app
from gateway.authentication import Authenticator, Policies
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.memory import MemoryLogs
from gateway.connect import connect
from gateway.http.client import HttpClient
from gateway.http.server import HttpServerProtocol
from gateway.limits.limiter import Limiter
from gateway.limits.memory import MemoryStore
from gateway.limits.store import LimitStore
from gateway.models import Models
from gateway.models_file import ModelConfig
from gateway.receipts.key_files import KeyFolder
from gateway.receipts.notary import Notary
from gateway.receipts.stores import MemoryReceipts, RedisReceipts
from gateway.settings import Settings
from gateway.telemetry.tracing import NO_TRACING, Tracing
from gateway.telemetry.traffic import Traffic
from gateway.token_keys import TokenKeys
from policies.document import DEFAULT_POLICY, FixedPolicy


@dataclass
class Gateway:
    """A running gateway and a client of it."""

    url: str
    http: httpx.AsyncClient
    models: Models
    log: CommitLog
    notary: Notary

    async def check(self) -> None:
        """Look after all replicas once."""
        for group in self.models.groups:
            for replica in group.replicas:
                await group.check(replica)

    async def chat(self, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "toy", "prompt": "hi"} | fields)


class PromptServer(uvicorn.Server):
    """uvicorn's server, without its waits of a tenth of a second at start and stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for task in self.server_state.tasks:
            task.cancel()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)


WELCOME_ALL = FixedPolicy(DEFAULT_POLICY)


async def no_sleep(delay_s: float) -> None:
    """Retries need not wait in tests."""


def draw_same_seed() -> int:
    """For tests whose answers in mode off have to repeat."""
    return 1234


@asynccontextmanager
async def launch_gateway(
    backend_url: str, draw_seed: Callable[[], int] = draw_same_seed, **more: Any
) -> AsyncIterator[Gateway]:
    async with launch_models((ModelConfig(None, (backend_url,)),), draw_seed, **more) as gateway:
        yield gateway


@asynccontextmanager
async def launch_models(
    configs: Sequence[ModelConfig],
    draw_seed: Callable[[], int] = draw_same_seed,
    policies: Policies = WELCOME_ALL,
    store: LimitStore | None = None,
    commit_log: CommitLog | None = None,
    receipts: RedisReceipts | None = None,
    tracing: Tracing = NO_TRACING,
    **overrides: object,
) -> AsyncIterator[Gateway]:
    """A gateway over many backends. Nobody looks after their health unless a test does."""
    settings = Settings(**overrides)  # type: ignore[arg-type]
    connect_s, silence_s = settings.connect_timeout_s, settings.first_byte_timeout_s
    async with HttpClient(connect_timeout_s=connect_s, silence_timeout_s=silence_s) as http_client:
        limiter = Limiter(store or MemoryStore(time.monotonic))
        commit_log = commit_log or CommitLog(MemoryLogs(settings.cache_bytes, time.monotonic))
        models = await connect(http_client, configs, settings, draw_seed, limiter, commit_log, no_sleep)
        authenticator = Authenticator(policies, TokenKeys(http_client), time.time)
        keys = KeyFolder(None if settings.receipt_keys is None else Path(settings.receipt_keys))
        memory = MemoryReceipts(settings.receipt_bytes, time.monotonic)
        notary = Notary(keys, memory, receipts, time.time)
        config = uvicorn.Config(
            build_app(models, authenticator, limiter, commit_log, notary, settings, Traffic(), tracing),
            http=HttpServerProtocol,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
        )
        server = PromptServer(config)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
                yield Gateway(url, http, models, commit_log, notary)
        finally:
            server.stop.set()
            await serving
