"""Verify calls that wait for rows, and the task that runs passes while there are any.

Calls take turns: one that has more rows to go than a pass held goes to the back. A call that brings nothing further
for want of memory waits for others to free some, and is given up after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from backend.protocol import VerifyRequest
from backend.server.errors import CallError
from backend.sglang.passes import Done, Span
from backend.sglang.replay import Replay

RunPass = Callable[[Sequence[Span]], Awaitable[list[Done]]]

MAX_WAITING = 256
STARVED_PAUSE_S = 0.02
MAX_STARVED_PASSES = 3000
"""A minute of passes in which a call got no memory."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Waiting:
    replay: Replay
    answered: asyncio.Future[None]
    starved: int = 0


class VerifyQueue:
    """Serves verify calls by passes of at most `groups` sequences."""

    def __init__(self, run_pass: RunPass, groups: int, max_context: int):
        self._run_pass = run_pass
        self._groups = groups
        self._max_context = max_context
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<VerifyQueue waiting={len(self._waiting)}>"

    async def verify(self, call: VerifyRequest) -> Replay:
        """The finished replay of a call. Raises CallError. Cancelling it drops the call."""
        if len(self._waiting) >= MAX_WAITING:
            raise CallError("overloaded", f"{MAX_WAITING} calls are waiting to be verified")
        entry = _Waiting(Replay(call, self._max_context), asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._arrived.set()
        try:
            await entry.answered
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        if entry.replay.broken:
            raise CallError("internal", "the model's logits for this context are not finite")
        return entry.replay

    async def serve(self) -> None:
        """Run passes for ever."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            group = [self._waiting[index] for index in range(min(self._groups, len(self._waiting)))]
            try:
                done = await self._run_pass([entry.replay.span() for entry in group])
            except Exception as error:
                # Whatever broke, it must reach the callers, and the next ones must find us here.
                log.exception("a verification pass failed")
                for entry in group:
                    self._answer(entry, CallError("internal", f"a verification pass failed: {error}"))
                continue
            for entry, part in zip(group, done, strict=True):
                self._take(entry, part)
            if not any(part.stop > part.start for part in done):
                await asyncio.sleep(STARVED_PAUSE_S)

    def _take(self, entry: _Waiting, done: Done) -> None:
        if entry not in self._waiting:
            return  # Its caller has left.
        self._waiting.remove(entry)
        entry.starved = 0 if entry.replay.take(done) else entry.starved + 1
        if entry.replay.done:
            self._answer(entry, None)
        elif entry.starved >= MAX_STARVED_PASSES:
            self._answer(entry, CallError("overloaded", "the KV pool has had no room for this context for a minute"))
        else:
            self._waiting.append(entry)

    def _answer(self, entry: _Waiting, error: CallError | None) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
        if entry.answered.done():
            return
        if error is None:
            entry.answered.set_result(None)
        else:
            entry.answered.set_exception(error)
