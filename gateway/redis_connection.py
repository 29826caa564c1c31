"""The gateway's connection to its Redis, for all that is kept there.

Owns the pool, the deadline and what travels together: scripts that are to be run at the same time go out in one batch,
so each costs a fraction of what it costs alone. What is called meanwhile goes with the next batch: scripts run in the
order of their calls, and what releases something cannot overtake what took it, even where the caller gave that up.

Every call has one deadline, connecting included. After it the answer is `StoreUnavailable` and the connection is
dropped, so no later call can read this one's answer. A deadline that comes due while this process itself was held up
says nothing of Redis: it is put off once by as long as it is late, so that what has arrived meanwhile can be read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from gateway.breaker import Breaker
from gateway.redis_url import close_sentinels, open_pool
from gateway.settings import REDIS_TIMEOUT_S

CONNECTIONS = 64
LATE_S = 0.005
"""How late a timer may be before that is put down to this process."""

_TROUBLES = (RedisError, OSError, TimeoutError)

Argument: TypeAlias = str | int | float | bytes


class StoreUnavailable(Exception):
    """The store did not answer in time, or not in order; nothing is known of what it did."""


@contextmanager
def guarded(breaker: Breaker, clock: Callable[[], float]) -> Iterator[None]:
    """For one call: none is made while the store keeps failing, which is `StoreUnavailable` too."""
    now = clock()
    if not breaker.allows(now):
        raise StoreUnavailable("it keeps failing")
    breaker.begin(now)
    try:
        yield
    except StoreUnavailable:
        breaker.settled()
        breaker.failed(clock())
        raise
    except BaseException:
        breaker.settled()
        raise
    breaker.succeeded()


class Script:
    """A Lua script; Redis knows it by its digest once it has run."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        return f"<Script {self.digest}>"


@dataclass(frozen=True, slots=True)
class _Call:
    script: Script
    arguments: tuple[Argument, ...]
    answer: asyncio.Future[Any]


class RedisConnection:
    """The Redis at a URL. The URL may hold a password and is never shown."""

    def __init__(self, url: str, deadline_s: float = REDIS_TIMEOUT_S) -> None:
        """Raises `ValueError` for what is no Redis URL."""
        self._deadline_s = deadline_s
        pool = open_pool(url, CONNECTIONS, deadline_s)
        self.redis: Redis = Redis.from_pool(pool)
        self._waiting: list[_Call] = []
        self._batch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RedisConnection waiting={len(self._waiting)}{'' if self._batch is None else ' busy'}>"

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """What a script answers; raises `StoreUnavailable` for whatever goes wrong."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(script, (len(keys), *keys, *arguments), answer))
        if self._batch is None:
            self._batch = asyncio.create_task(self._send())

        def give_up() -> None:
            if not answer.done():
                answer.set_exception(TimeoutError())

        deadline = _Deadline(self._deadline_s, give_up)
        try:
            return await answer
        except _TROUBLES as error:
            raise StoreUnavailable(type(error).__name__) from error
        finally:
            deadline.cancel()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """One call, or a few that share a deadline; raises `StoreUnavailable` for whatever goes wrong with them."""
        try:
            async with _ending(self._deadline_s):
                yield
        except _TROUBLES as error:
            raise StoreUnavailable(type(error).__name__) from error

    async def aclose(self) -> None:
        """Close all connections; what is on its way is given up."""
        if self._batch is not None:
            self._batch.cancel()
            await asyncio.gather(self._batch, return_exceptions=True)
        await self.redis.aclose()
        await close_sentinels(self.redis.connection_pool)

    async def _send(self) -> None:
        """Send what waits, batch by batch, until nothing does."""
        try:
            while self._waiting:
                # Also what nobody waits for any more: who is cancelled while giving something back has still given it.
                calls, self._waiting = self._waiting, []
                await self._run(calls)
        finally:
            self._batch = None

    async def _run(self, calls: list[_Call]) -> None:
        """Give each call its answer, or what went wrong."""
        try:
            async with _ending(self._deadline_s):
                unknown = _answer(calls, await self._exchange("EVALSHA", calls))
                if unknown:
                    _answer(unknown, await self._exchange("EVAL", unknown))
        except _TROUBLES as error:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)

    async def _exchange(self, command: str, calls: list[_Call]) -> list[Any]:
        async with self.redis.pipeline(transaction=False) as pipeline:
            for call in calls:
                named = call.script.digest if command == "EVALSHA" else call.script.text
                pipeline.execute_command(command, named, *call.arguments)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers


class _Deadline:
    """Calls `expire` after so long, and later where this process was held up itself."""

    def __init__(self, seconds: float, expire: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._expire = expire
        due = self._loop.time() + seconds
        self._timer = self._loop.call_at(due, self._due, due)

    def __repr__(self) -> str:
        return f"<_Deadline {self._timer!r}>"

    def cancel(self) -> None:
        self._timer.cancel()

    def _due(self, due: float) -> None:
        late = self._loop.time() - due
        if late > LATE_S:
            self._timer = self._loop.call_later(min(late, self._seconds), self._expire)
        else:
            self._expire()


@asynccontextmanager
async def _ending(seconds: float) -> AsyncIterator[None]:
    """Cancel what is inside after so long; raises `TimeoutError`."""
    async with asyncio.timeout(None) as timeout:
        deadline = _Deadline(seconds, lambda: timeout.reschedule(0))
        try:
            yield
        finally:
            deadline.cancel()


def _answer(calls: list[_Call], answers: list[Any]) -> list[_Call]:
    """Hand out the answers; the calls whose script Redis does not know are left."""
    unknown = []
    for call, answer in zip(calls, answers, strict=True):
        if isinstance(answer, NoScriptError):
            unknown.append(call)
        elif call.answer.done():
            continue
        elif isinstance(answer, Exception):
            call.answer.set_exception(answer)
        else:
            call.answer.set_result(answer)
    return unknown
