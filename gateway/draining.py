"""How the gateway stops: it finishes what it has before it closes its door.

The first SIGTERM or SIGINT stops admission (requests get 503) while those in flight run on, for at most the drain
timeout. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from gateway.admission import Admission

LAST_WORDS_S = 2
"""How long what is cut short at the end of a drain may take to tell its client so, and then to be sent."""

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """A server that says when it answers, and finishes what it has before it closes its door."""

    def __init__(
        self, config: uvicorn.Config, admission: Admission, drain_timeout_s: float, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._admission = admission
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept; only now is there something to announce."""
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn in its signal handler."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drain, then stop; called again, stop at once."""
        if self._drain is None:
            self._admission.drain()
            self._drain = self._loop.create_task(self._drain_then_exit())
        else:
            self.should_exit = True
            self.force_exit = True

    async def _drain_then_exit(self) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._admission.wait_idle()
        except TimeoutError:
            await self._end()
        self.should_exit = True

    async def _end(self) -> None:
        """Cut short what is in flight, which still has to be told so."""
        self._admission.expire()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._admission.wait_idle()
        except TimeoutError:
            log.error("requests in flight do not end; their connections are closed: %r", self._admission)
