"""`verbatim up`: an engine and a gateway as two processes, watched as one.

Owns the order of start and stop and what is shown meanwhile: on standard output that it is ready, on standard error
all that leads there or goes wrong. Whatever ends first (a signal, a child) ends all.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from gateway.backends.client import BackendClient
from gateway.cli.children import Child, Children
from gateway.errors import BackendError
from gateway.http.client import HttpClient
from gateway.settings import Settings
from policies.api_keys import new_key

BACKEND_COMMANDS = {
    "engine": (sys.executable, "-m", "backend.server"),
    # SGLang may live in an environment of its own.
    "sglang": (os.environ.get("VERBATIM_SGLANG_PYTHON", sys.executable), "-m", "backend.sglang.serve"),
}
GATEWAY_COMMAND = (sys.executable, "-m", "gateway.cli", "gateway")
POLL_S = 0.2
ENGINE_GRACE_S = 10.0
GATEWAY_GRACE_MARGIN_S = 5.0
"""On top of the gateway's own drain timeout, before it is killed."""


async def run_up(
    settings: Settings, engine_argv: list[str], gateway_argv: list[str], engine_command: Sequence[str]
) -> int:
    """Run both until a signal comes or one of them ends; returns the exit status.

    Without an admin key in the settings one is drawn for this run, and shown.
    """
    console = Console(stderr=True)
    admin_key = None
    if settings.admin_key is None:
        admin_key, kept = new_key()
        gateway_argv = [*gateway_argv, "--admin-key", kept.hash]
    async with Children() as children:
        signals = _Signals(on_second=children.kill)
        assert settings.backend is not None
        address = httpx.URL(settings.backend)
        engine = await children.start(
            "engine",
            [*engine_command, "--host", address.host, "--port", str(address.port), *engine_argv],
            grace_s=ENGINE_GRACE_S,
            quiet=True,
        )
        gateway = await children.start(
            "gateway",
            [*GATEWAY_COMMAND, "--backend", settings.backend, *gateway_argv],
            grace_s=settings.drain_timeout_s + GATEWAY_GRACE_MARGIN_S,
            quiet=True,
        )
        until_ready = asyncio.create_task(_until_ready(settings, console, admin_key))
        ends = {asyncio.create_task(child.wait()): child for child in (engine, gateway)}
        stopped = asyncio.create_task(signals.first.wait())
        try:
            await asyncio.wait((until_ready, stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
            if until_ready.done():
                click.echo(until_ready.result())
                await asyncio.wait((stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (until_ready, stopped):
                task.cancel()
            await asyncio.gather(until_ready, stopped, return_exceptions=True)
        code = _report(console, ends)
    await asyncio.gather(*ends)
    return code


class _Signals:
    """The first SIGINT or SIGTERM stops in order, the next one at once."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self._on_second = on_second
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._came)

    def _came(self) -> None:
        if self.first.is_set():
            self._on_second()
        self.first.set()


async def _until_ready(settings: Settings, console: Console, admin_key: str | None) -> str:
    """Show the engine's progress until the gateway answers; returns what to tell the user then."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    assert settings.backend is not None
    http = HttpClient(connect_timeout_s=1.0, silence_timeout_s=5.0)
    async with http, httpx.AsyncClient(base_url=settings.base_url, trust_env=False) as client:
        engine = BackendClient(http, settings.backend, call_timeout_s=5.0)
        with Progress(*columns, console=console) as progress:
            loading = progress.add_task("Loading the model", total=1.0)
            while (status := await _status(client)) is None:
                await _show(engine, progress, loading)
                await asyncio.sleep(POLL_S)
            progress.update(loading, completed=1.0)
        model = (await engine.info()).model
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "is_deterministic": True}
    curl = [
        "curl",
        f"{settings.base_url}/v1/chat/completions",
        "-H",
        "content-type: application/json",
        *(() if status != httpx.codes.UNAUTHORIZED else ("-H", "authorization: Bearer YOUR_KEY")),
        "-d",
        json.dumps(body),
    ]
    ui = f"{settings.base_url}/ui" + ("" if admin_key is None else f"#key={admin_key}")
    ready = f"Verbatim is ready: {settings.base_url}/v1"
    return f"{ready}\nTry it:\n  {shlex.join(curl)}\nLook at it:\n  {ui}\nStop with Ctrl-C."


async def _status(client: httpx.AsyncClient) -> int | None:
    """How the gateway greets who shows no credentials, once it answers."""
    try:
        return (await client.get("/v1/models")).status_code
    except httpx.TransportError:
        return None


async def _show(engine: BackendClient, progress: Progress, task: TaskID) -> None:
    """Move the bar. An engine that fails ends by itself, which the caller sees."""
    try:
        health = await engine.health()
    except BackendError:
        return
    progress.update(task, completed=health.loaded)


def _report(console: Console, ends: dict[asyncio.Task[int], Child]) -> int:
    """Say which child ended unasked; returns the exit status."""
    for end, child in ends.items():
        if end.done():
            console.print(f"The {child.name} stopped by itself, with status {end.result()}.", style="red")
            return 1
    return 0
