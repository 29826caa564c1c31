"""Verify calls that wait for rows, and the task that runs passes while there are any.

Calls are admitted in order, as many as half of the KV pool holds, and at least one; admitted ones take turns, each at
the back again after a pass. Without that bound long calls would evict each other's prefixes between their turns and
none would ever end. A call that gets no memory at all, because traffic outside holds it, is given up after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from backend.protocol import VerifyRequest
from backend.server.errors import CallError
from backend.sglang.passes import Done, PassFailedError, Span
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

    def __init__(self, run_pass: RunPass, groups: int, max_context: int, pool_tokens: int):
        self._run_pass = run_pass
        self._groups = groups
        self._max_context = max_context
        self._budget = pool_tokens // 2
        self._waiting: deque[_Waiting] = deque()
        self._admitted: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<VerifyQueue admitted={len(self._admitted)} waiting={len(self._waiting)}>"

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
            self._drop(entry)
        if entry.replay.broken:
            raise CallError("internal", "the model's logits for this context are not finite")
        return entry.replay

    async def serve(self) -> None:
        """Run passes for ever."""
        while True:
            self._admit()
            while not self._admitted:
                self._arrived.clear()
                await self._arrived.wait()
                self._admit()
            group = list(islice(self._admitted, self._groups))
            try:
                done = await self._run_pass([entry.replay.span() for entry in group])
            except PassFailedError as error:
                log.error("a verification pass failed: %s", error)
                for entry in group:
                    self._answer(entry, CallError("internal", f"a verification pass failed: {error}"))
                continue
            for entry, part in zip(group, done, strict=True):
                self._take(entry, part)
            if not any(part.stop > part.start for part in done):
                await asyncio.sleep(STARVED_PAUSE_S)

    def _admit(self) -> None:
        held = sum(entry.replay.length for entry in self._admitted)
        while self._waiting:
            held += self._waiting[0].replay.length
            if self._admitted and held > self._budget:
                return
            self._admitted.append(self._waiting.popleft())

    def _take(self, entry: _Waiting, done: Done) -> None:
        if entry not in self._admitted:
            return  # Its caller has left.
        entry.starved = 0 if entry.replay.take(done) else entry.starved + 1
        if entry.replay.done:
            self._answer(entry, None)
        elif entry.starved >= MAX_STARVED_PASSES:
            self._answer(entry, CallError("overloaded", "the KV pool has had no room for this context for a minute"))
        else:
            self._admitted.remove(entry)
            self._admitted.append(entry)

    def _answer(self, entry: _Waiting, error: CallError | None) -> None:
        self._drop(entry)
        if entry.answered.done():
            return
        if error is None:
            entry.answered.set_result(None)
        else:
            entry.answered.set_exception(error)

    def _drop(self, entry: _Waiting) -> None:
        for calls in (self._admitted, self._waiting):
            if entry in calls:
                calls.remove(entry)
