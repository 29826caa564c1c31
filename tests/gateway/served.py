"""A toy backend and a real gateway in a thread of their own, for tests that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from launched import launch_gateway
from toy_backend import ToyBackend


@dataclass(frozen=True)
class Served:
    url: str
    toy: ToyBackend


@contextmanager
def served(toy: ToyBackend, **more: Any) -> Iterator[Served]:
    """Runs until the context ends; `more` is for `launch_gateway`."""
    loop = asyncio.new_event_loop()
    found: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with toy, launch_gateway(toy.url, **more) as gateway:
            found.append(gateway.url)
            ready.set()
            await stop.wait()

    def main() -> None:
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()
            ready.set()

    thread = threading.Thread(target=main)
    thread.start()
    ready.wait()
    try:
        yield Served(found[0], toy)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
