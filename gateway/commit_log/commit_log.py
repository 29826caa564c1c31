"""Reads completions out of the commit log, and has generated what is not in it.

Owns who shares a flight. Requests of one tenant that want the same sequence with as many alternatives share one, so
that it is generated once; a request that may not read or may not write has one of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal, TypeAlias

from gateway.commit_log.flight import Flight, Generator, Keeping, Standing, Stores
from gateway.commit_log.key import log_key
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.purges import Purges
from gateway.commit_log.redis import RedisLogs
from gateway.domain import Commit, Finish, Finished, Job, Progress, Token

Source: TypeAlias = Literal["hit", "follow", "lead"]
"""Where an answer comes from: the log had it, somebody was generating it already, or it was generated for this one."""


class CommitLog:
    """The logs of all models. `served` counts readings by where they came from."""

    def __init__(self, memory: MemoryLogs, shared: RedisLogs | None = None) -> None:
        self.stores = Stores(memory, shared)
        self.purges = Purges(self.forget, None if shared is None else shared.connection)
        self._flights: dict[tuple[bytes, int, str], Flight] = {}
        self.served: dict[Source, int] = {"hit": 0, "follow": 0, "lead": 0}

    def __repr__(self) -> str:
        return f"<CommitLog {self.stores.memory!r} {self.stores.shared!r} flights={self.flights} {self.served}>"

    @property
    def flights(self) -> int:
        """How many logs are being read or gone on with."""
        return len(self._flights)

    def forget(self, selects: Callable[[bytes], bool]) -> int:
        """Forget what stands in this process, also what is being read or gone on with; how many logs stood."""
        for name in [name for name in self._flights if selects(name[0])]:
            self._flights.pop(name).keep_nothing()
        return self.stores.memory.purge(selects)

    @asynccontextmanager
    async def open(
        self,
        reader: str | None,
        fingerprint: str,
        job: Job,
        keeping: Keeping,
        generator: Generator,
        wanted: Callable[[Sequence[Token]], int],
    ) -> AsyncIterator[Reading]:
        """Read a job's tokens. `reader` is the tenant whose log it is, None for one that is shared.

        `wanted` says how many are wanted, in sight of the first ones: no more than there are, where these hold a stop.

        Leaving the context ends what is done for this reading alone. Raises what the generator raises.
        """
        key = log_key(reader, fingerprint, job)
        if self.purges.concern(key):
            keeping = replace(keeping, reads=False, writes=False)
        if keeping.reads:
            # Most hits end here: nobody has to fetch what stands in memory.
            standing = Standing(self.stores.memory.read(key), job)
            if standing.has(wanted(standing.tokens)):
                self.served["hit"] += 1
                yield Reading(standing, job, "hit")
                return
        token = uuid.uuid4().hex
        name = (key, job.top_logprobs, "" if keeping.reads and keeping.writes else token)
        flight = self._flights.get(name)
        begun = flight is not None and flight.error is None
        if flight is None or flight.error is not None:
            self._flights[name] = flight = Flight(key, job, keeping, self.stores, generator, token)
        count = 0
        flight.join(count)
        try:
            flight.recall()
            want = wanted(flight.tokens)
            if not flight.has(want):
                await flight.look()
                want = wanted(flight.tokens)
            stood = keeping.reads and flight.has(want)
            flight.join(want)
            flight.leave(count)
            count = want
            while flight.leads is None and not flight.has(want):
                await flight.move()
            source: Source = "lead"
            if stood:
                source = "hit"
            elif begun or not flight.leads:
                source = "follow"
            self.served[source] += 1
            yield Reading(flight, job, source)
        finally:
            if flight.leave(count):
                # First of all, so that nobody joins a flight that is ending.
                if self._flights.get(name) is flight:
                    del self._flights[name]
                await flight.land()


class Reading:
    """One request's view of a log: so many tokens of it, with so many alternatives."""

    def __init__(self, flight: Flight | Standing, job: Job, source: Source) -> None:
        self._flight = flight
        self._job = job
        self.source = source
        self._read = 0

    @property
    def recalled(self) -> int:
        """How many of the tokens read so far were not generated for this reading."""
        return max(0, self._read - self._flight.generated) if self.source == "lead" else self._read

    def __repr__(self) -> str:
        return f"<Reading {self.source} {self._flight!r}>"

    async def progress(self) -> AsyncGenerator[Progress]:
        """What stands, then what comes; to the end of what was asked for. Raises what the generator raises."""
        position = 0
        while True:
            fresh = self._flight.tokens[position : self._job.max_tokens]
            if fresh:
                self._read = position = position + len(fresh)
                yield Commit(self._cut(fresh), self._flight.counts)
            elif (finish := self._finish(position)) is not None:
                yield Finished(finish)
                return
            else:
                await self._flight.move()

    def _cut(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        most = self._job.top_logprobs
        return tuple([t if len(t.top) == most else Token(t.id, t.logprob, t.top[:most]) for t in tokens])

    def _finish(self, position: int) -> Finish | None:
        if position and self._flight.tokens[position - 1].id in self._job.stop_ids:
            return "stop"
        if position == self._job.max_tokens:
            return "length"
        return self._flight.finish if position == len(self._flight.tokens) else None
