"""One window-protocol call in the engine, awaited from the event loop.

A call that is abandoned, because its client has left or its handler was cancelled, is cancelled in the engine at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from backend.engine.admission import QueueFullError
from backend.engine.engine import Engine, EngineError
from backend.engine.tasks import Scored, Task
from backend.server.errors import CallError


class _Mailbox:
    """Carries what the engine's thread says to the event loop. None marks the end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Sequence[Scored] | Exception | None] = asyncio.Queue()

    def produced(self, tokens: Sequence[Scored]) -> None:
        self._post(tokens)

    def ended(self) -> None:
        self._post(None)

    def failed(self, error: Exception) -> None:
        self._post(error)

    def _post(self, item: Sequence[Scored] | Exception | None) -> None:
        # A loop that has closed has nobody waiting any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.items.put_nowait, item)


async def stream(engine: Engine, task: Task) -> AsyncGenerator[Sequence[Scored], None]:
    """Run a task and yield its tokens as they come (a verify task's are read off it at the end).

    Raises CallError where the engine refuses or fails it.
    """
    mailbox = _Mailbox()
    engine.submit(task, mailbox)
    finished = False
    try:
        while True:
            item = await mailbox.items.get()
            if item is None:
                finished = True
                return
            if isinstance(item, QueueFullError):
                finished = True
                raise CallError("overloaded", str(item)) from item
            if isinstance(item, Exception):
                finished = True
                at_fault = item.field if isinstance(item, EngineError) else None
                raise CallError("invalid_request" if at_fault else "internal", str(item), at_fault) from item
            yield item
    finally:
        if not finished:
            engine.cancel(task)


async def run(engine: Engine, task: Task) -> None:
    """Run a task to its end. Raises CallError where the engine refuses or fails it."""
    async for _ in stream(engine, task):
        pass
