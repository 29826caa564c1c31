"""Builds the gateway out of its parts and serves it.

Owns the wiring and the order of start and stop. The gateway does not listen before its backend is ready: a port that
accepts is a gateway that answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.admin.access import AdminAccess
from gateway.admin.routes import build_admin_router
from gateway.admin.status import Status, build_status_router
from gateway.authentication import Authenticator
from gateway.backends.replica_group import watch
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.redis import RedisLogs
from gateway.commit_log.sealing import Checked, Encrypted, Sealer
from gateway.connect import connect
from gateway.direct import Direct
from gateway.draining import LAST_WORDS_S, DrainingServer
from gateway.errors import ConfigError
from gateway.http.client import HttpClient
from gateway.http.error_response import ERROR_HANDLERS
from gateway.http.server import HttpServerProtocol
from gateway.limits.limiter import Limiter
from gateway.limits.memory import MemoryStore
from gateway.limits.redis import RedisStore
from gateway.metrics import Metrics, build_metrics_router
from gateway.models import Models
from gateway.models_file import ModelConfig
from gateway.observed import Observed
from gateway.operator_keys import read_keys
from gateway.passthrough import Passthrough
from gateway.receipts.key_files import KeyFolder
from gateway.receipts.notary import Notary
from gateway.receipts.sealing import ReceiptSealer
from gateway.receipts.stores import MemoryReceipts, RedisReceipts
from gateway.redis_connection import RedisConnection, StoreUnavailable
from gateway.routes import Generating, build_router
from gateway.settings import Settings, Traces
from gateway.telemetry.loop_lag import watch_lag
from gateway.telemetry.tracing import NO_TRACING, Tracing
from gateway.telemetry.traffic import Traffic
from gateway.token_keys import TokenKeys
from gateway.ui.pages import build_ui_router
from policies.document import FixedPolicy
from policies.policy_file import PolicyFile

KEEP_ALIVE_S = 75
"""How long an idle connection is kept. Longer than clients (httpx, and so OpenAI's: 5 s) and load balancers (60 s) do:
a connection that we close while a request is on its way over it is an error to whoever sent it."""

DRAWN_SEEDS = 2**53
"""Seeds are drawn below this: every JSON library can send back what the answer's header says."""

log = logging.getLogger(__name__)


def build_app(
    models: Models,
    authenticator: Authenticator,
    limiter: Limiter,
    commit_log: CommitLog,
    notary: Notary,
    settings: Settings,
    traffic: Traffic,
    tracing: Tracing = NO_TRACING,
) -> ASGIApp:
    """The application over parts that are ready, whose requests are summed up in `traffic`."""
    max_body_bytes = settings.max_body_bytes
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    router = build_router(models, authenticator, notary, max_body_bytes, int(time.time()))
    app.include_router(router)
    access = AdminAccess(settings.admin_key)
    app.include_router(build_admin_router(access, models, authenticator, commit_log, max_body_bytes))
    metrics = Metrics(traffic, models, commit_log, notary, limiter, authenticator.policies)
    app.include_router(build_metrics_router(access, metrics))
    status = Status(traffic, models, authenticator.policies, commit_log)
    app.include_router(build_status_router(access, status))
    app.include_router(build_ui_router())
    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    posts = [route for route in router.routes if isinstance(route, Route) and isinstance(route.endpoint, Generating)]
    whole: ASGIApp = Direct(app, {route.path: route.endpoint for route in posts}, ERROR_HANDLERS)
    if models.upstreams:
        whole = Passthrough(
            whole,
            models,
            authenticator,
            limiter,
            max_body_bytes=max_body_bytes,
            call_timeout_s=settings.call_timeout_s,
        )
    return Observed(whole, traffic, tracing, logs=settings.access_log, logs_bodies=settings.log_prompts)


def draw_seed() -> int:
    """A seed nobody asked for."""
    return secrets.randbelow(DRAWN_SEEDS)


async def serve(
    settings: Settings,
    models: Sequence[ModelConfig],
    policies: PolicyFile | FixedPolicy,
    receipt_keys: KeyFolder,
    listener: socket.socket,
    announce: Callable[[str], None],
) -> None:
    """Run the gateway on a bound socket until it is told to stop; `announce` gets the base URL once it answers."""
    http = HttpClient(connect_timeout_s=settings.connect_timeout_s, silence_timeout_s=settings.first_byte_timeout_s)
    async with (
        http,
        open_redis(settings.redis, settings.redis_timeout_s) as redis,
        open_tracing(settings.traces) as tracing,
    ):
        if redis is not None:
            await greet(redis)
        limiter = Limiter(MemoryStore(time.monotonic) if redis is None else RedisStore(redis))
        sealer = open_sealer(settings.cache_keys)
        shared = None if redis is None else RedisLogs(redis, time.monotonic, sealer=sealer)
        commit_log = CommitLog(MemoryLogs(settings.cache_bytes, time.monotonic), shared)
        served = await connect(http, models, settings, draw_seed, limiter, commit_log)
        authenticator = Authenticator(policies, TokenKeys(http), time.time)
        receipts = MemoryReceipts(settings.receipt_bytes, time.monotonic)
        receipt_sealer = ReceiptSealer(() if settings.cache_keys is None else read_keys(settings.cache_keys))
        shared_receipts = None if redis is None else RedisReceipts(redis, time.monotonic, receipt_sealer)
        notary = Notary(receipt_keys, receipts, shared_receipts, time.time)
        traffic = Traffic()
        config = uvicorn.Config(
            build_app(served, authenticator, limiter, commit_log, notary, settings, traffic, tracing),
            lifespan="off",
            http=HttpServerProtocol,
            proxy_headers=False,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        base_url = replace(settings, port=listener.getsockname()[1]).base_url + "/v1"
        watching = [
            asyncio.create_task(watch(served.groups, settings.health_interval_s)),
            asyncio.create_task(commit_log.purges.watch()),
            asyncio.create_task(watch_lag(traffic.loop_lag, asyncio.get_running_loop().time)),
        ]
        if isinstance(policies, PolicyFile):
            watching.append(asyncio.create_task(policies.watch()))
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up, policies, receipt_keys)
        try:
            server = DrainingServer(config, served.admission, settings.drain_timeout_s, lambda: announce(base_url))
            await server.serve([listener])
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


def hang_up(policies: PolicyFile, receipt_keys: KeyFolder) -> None:
    """Read anew what is in files: the keys first, which the policy may need."""
    receipt_keys.reload()
    policies.ask()


@asynccontextmanager
async def open_redis(url: str | None, timeout_s: float) -> AsyncIterator[RedisConnection | None]:
    """What gateways share; raises `ConfigError` for what is no URL."""
    if url is None:
        yield None
        return
    try:
        connection = RedisConnection(url, timeout_s)
    except ValueError as error:
        raise ConfigError("redis: not a URL of a Redis", param="redis") from error
    try:
        yield connection
    finally:
        await connection.aclose()


def open_sealer(keys: str | None) -> Sealer:
    """What answers in Redis are sealed with; raises `ConfigError` for what is no key."""
    if keys is None:
        return Checked()
    try:
        return Encrypted(read_keys(keys))
    except ValueError as error:
        raise ConfigError(f"cache_keys {error}", param="cache_keys") from error


@asynccontextmanager
async def open_tracing(traces: Traces) -> AsyncIterator[Tracing]:
    """Where spans go; raises `ConfigError` where what exports them is not installed."""
    if traces == "off":
        yield NO_TRACING
        return
    try:
        otel = import_module("gateway.telemetry.otel")  # an extra, which most installations lack
    except ModuleNotFoundError as error:
        raise ConfigError(f"traces: {error.name} is missing: install Verbatim with the extra 'otel'") from error
    tracing = otel.Otel()
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close)


async def greet(redis: RedisConnection) -> None:
    """Say at once where the Redis is not there. That stops nothing: it may come, and requests go on without it."""
    try:
        async with redis.answering():
            await redis.redis.ping()
    except StoreUnavailable as error:
        log.warning("the Redis does not answer (%s): until it does no answers are shared, nor limits counted", error)
