"""One log being read, and gone on with, in this process: by one task for all who want its tokens.

Owns the tokens as far as they are known here and the task that gets more of them: out of this process's memory, out of
the shared store, from whoever leads there, or from the backend. What is generated stands in the log before anybody is
shown it, so what a client has seen is never contradicted by what the next one gets.

A flight does not end with the request that began it: as long as somebody wants more it goes on. When nobody does it is
cancelled, and the log stays as long as it is. A leader elsewhere that dies is found out by its lease, and the flight
goes on where the log ends.

A log knows tokens with fewer alternatives than are wanted here? These are the first drafts: to verify them costs less
than to generate them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.commit_log.memory import Conflict, Gap, MemoryLogs
from gateway.commit_log.packing import known
from gateway.commit_log.redis import Lease, RedisLogs
from gateway.domain import Commit, Counts, Finish, Finished, Job, Progress, Token
from gateway.errors import ProtocolViolation
from gateway.redis_connection import StoreUnavailable

FOLLOW_EVERY_S = 0.02
"""How often a follower of another gateway looks for new tokens."""
RENEWALS = 3
"""How often a lease is renewed while it lasts."""

log = logging.getLogger(__name__)


class Generator(Protocol):
    """Generates verified tokens."""

    def generate(self, job: Job, committed: Sequence[int], recorded: Sequence[int]) -> AsyncGenerator[Progress]:
        """The job's tokens behind those committed; those recorded are what is expected to come."""
        ...

    def quarantine(self) -> bool:
        """Ask those no more who generated last; whether others are left."""
        ...


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a request may do with the log, and how long and how far what it adds is kept."""

    reads: bool
    writes: bool
    ttl_s: float
    max_tokens: int | None


class Stores:
    """Where logs are: in this process's memory, and in the store that it shares with others where there is one.

    `conflicts` counts the appends that disagreed with what stands.
    """

    def __init__(self, memory: MemoryLogs, shared: RedisLogs | None) -> None:
        self.memory = memory
        self.shared = shared
        self.conflicts = 0


class Standing:
    """The tokens of one job that stand, with so many alternatives: to its readers a flight with nothing left to do."""

    def __init__(self, tokens: Sequence[Token], job: Job) -> None:
        self.tokens = tokens[: known(tokens, job.top_logprobs)]
        self.finish: Finish | None = None
        self.counts = Counts()
        self.generated = 0
        self._stop_ids = job.stop_ids

    def __repr__(self) -> str:
        return f"<Standing tokens={len(self.tokens)}>"

    def has(self, count: int) -> bool:
        """Whether so many tokens are there, or all that will ever be."""
        return len(self.tokens) >= count or (bool(self.tokens) and self.tokens[-1].id in self._stop_ids)

    async def move(self) -> None:
        raise AssertionError("all that is wanted stands")


class Flight:
    """The tokens of one job with so many alternatives. `leads` says whether they are generated here.

    The job's `max_tokens` is not used: `want` says how many are wanted.
    """

    def __init__(
        self, key: bytes, job: Job, keeping: Keeping, stores: Stores, generator: Generator, token: str
    ) -> None:
        self._key = key
        self._job = job
        self._keeping = keeping
        self._stores = stores
        self._shared = stores.shared
        self._generator = generator
        both = keeping.reads and keeping.writes
        self._lease = Lease(token, job.top_logprobs) if both and stores.shared is not None else None
        self._wants: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looked = False
        self._claimed = False
        self._recorded: list[int] = []
        """Ids that stand behind `tokens`, with too few alternatives."""
        self.tokens: list[Token] = []
        self.generated = 0
        """How many of the tokens were generated for this flight."""
        self.finish: Finish | None = None
        self.counts = Counts()
        self.leads: bool | None = None
        """None until somebody looked."""
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Flight {self._key.hex()[:8]} tokens={len(self.tokens)} wants={self._wants} leads={self.leads}>"

    def join(self, count: int) -> None:
        """Somebody wants so many tokens; 0 to find out first what stands."""
        self._wants.append(count)
        if self._wanted and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._fly())
            self._task.add_done_callback(self._landed)

    def recall(self) -> None:
        """Take what stands in this process's memory."""
        if self._keeping.reads:
            self._take(0, self._stores.memory.read(self._key))

    def keep_nothing(self) -> None:
        """Leave nothing in the log from now on, and follow nobody: it is being thrown away."""
        self._keeping = replace(self._keeping, writes=False)

    async def look(self) -> None:
        """Take what stands in the shared store, if nobody did before."""
        async with self._looking:
            if self._keeping.reads and not self._looked:
                await self._look(None)
                self._looked = True

    def leave(self, count: int) -> bool:
        """They do not want them any more; whether they were the last, who has to `land` it."""
        self._wants.remove(count)
        return not self._wants

    async def land(self) -> None:
        """End all that is done for this flight."""
        if self._task is not None:
            self._task.cancel()
            # An error has been told to all who were there to be told.
            await asyncio.gather(self._task, return_exceptions=True)
        # Here and not in the task, where the cancellation might strike it.
        await self._release()

    def has(self, count: int) -> bool:
        """Whether so many tokens are there, or all that will ever be."""
        return len(self.tokens) >= count or self.ended

    @property
    def ended(self) -> bool:
        return self.finish is not None or (bool(self.tokens) and self.tokens[-1].id in self._job.stop_ids)

    async def move(self) -> None:
        """Wait for something new; raises what went wrong."""
        if self.error is None:
            await self._moved.wait()
        if self.error is not None:
            raise self.error

    @property
    def _wanted(self) -> bool:
        return not self.has(max(self._wants, default=0))

    @property
    def _is_full(self) -> bool:
        """Whether the log takes no more: what is to come nobody else will find there, so nobody need wait for it."""
        most = self._keeping.max_tokens
        return most is not None and len(self.tokens) >= most

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _landed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.error = task.exception()
            self._move()

    async def _fly(self) -> None:
        # Between the last look at what is wanted and the end of the task nothing is awaited: who joins later finds it
        # done and begins another one.
        while self._wanted:
            await self._catch_up()
            if self._wanted and self.leads:
                await self._lead()
            elif self._wanted:
                await asyncio.sleep(FOLLOW_EVERY_S)
            if not self._wanted:
                await self._release()

    async def _catch_up(self) -> None:
        """Take what stands, and find out who leads."""
        self.leads = True
        self.recall()
        if self._wanted and self._lease is not None and self._keeping.writes and not self._is_full:
            self._claimed = True
            self.leads = await self._look(self._lease)
        self._move()

    async def _look(self, lease: Lease | None) -> bool:
        """Take what stands in the shared store; whether nobody else leads."""
        if self._shared is None:
            return True
        position = len(self.tokens)
        try:
            look = await self._shared.look(self._key, position, lease)
        except StoreUnavailable:
            return True  # Counted and said by the store, as below. What is generated twice is the same.
        if look.tokens and self._keeping.writes:
            try:
                self._remember(position, look.tokens, look.ttl_s)
            except Conflict as conflict:
                self._alarm(conflict)
                self._stores.memory.drop(self._key)
                raise ProtocolViolation("two copies of a commit log contradict each other") from conflict
        self._take(position, look.tokens)
        return look.leads

    def _take(self, position: int, tokens: Sequence[Token]) -> None:
        """Take what stands from `position` on, and expect what stands there with too few alternatives."""
        usable = known(tokens, self._job.top_logprobs)
        self._add(position, tokens[:usable])
        if tokens and len(self.tokens) == position + usable:
            self._recorded = [token.id for token in tokens[usable:]]

    def _add(self, position: int, tokens: Sequence[Token]) -> None:
        """Go on with tokens whose place is from `position` on. Others may have brought some of them meanwhile: readers
        that look, and flights with another number of alternatives."""
        assert position <= len(self.tokens)
        self.tokens += tokens[len(self.tokens) - position :]

    async def _lead(self) -> None:
        """Generate for as long as it is wanted and nobody else does."""
        job = replace(self._job, max_tokens=max(self._wants))
        committed = [token.id for token in self.tokens]
        position = len(committed)
        recorded, self._recorded = self._recorded, []
        renewing = None if self._lease is None or self._is_full else asyncio.create_task(self._renew(self._lease))
        try:
            async with aclosing(self._generator.generate(job, committed, recorded)) as progress:
                async for step in progress:
                    match step:
                        case Commit():
                            leads = await self._append(position, step.tokens)
                            self._add(position, step.tokens)
                            position += len(step.tokens)
                            self.generated += len(step.tokens)
                            self.counts = step.counts
                            self._move()
                            if not leads or not self._wanted:
                                break
                        case Finished():
                            # Others may want more than this run was to bring.
                            if len(self.tokens) < job.max_tokens:
                                self.finish = step.finish
                                self._move()
        except Conflict as conflict:
            self._alarm(conflict)
            if not self._generator.quarantine():
                raise ProtocolViolation("the backend contradicts tokens that it gave before") from conflict
        finally:
            if renewing is not None:
                renewing.cancel()

    def _alarm(self, conflict: Conflict) -> None:
        self._stores.conflicts += 1
        log.critical("commit log %s: %s. A verifier broke its guarantee", self._key.hex(), conflict)

    async def _append(self, position: int, tokens: Sequence[Token]) -> bool:
        """Have them stand in the log; whether to go on leading."""
        most = self._keeping.max_tokens
        kept = tokens if most is None else tokens[: max(0, most - position)]
        if not kept or not self._keeping.writes:
            return True
        leads = True
        if self._shared is not None:
            try:
                leads = await self._share(self._shared, position, kept) or self._lease is None
            except StoreUnavailable:
                pass
            except Conflict:
                self._stores.memory.drop(self._key)  # It knows no better than this flight.
                raise
        # Last, since who reads in this process is shown what stands here.
        if self._keeping.writes:
            self._remember(position, kept, self._keeping.ttl_s)
        return leads

    def _remember(self, position: int, tokens: Sequence[Token], ttl_s: float) -> None:
        try:
            self._stores.memory.append(self._key, position, tokens, ttl_s)
        except Gap:
            # Evicted meanwhile, or never there.
            self._stores.memory.append(self._key, 0, [*self.tokens[:position], *tokens], ttl_s)

    async def _share(self, shared: RedisLogs, position: int, tokens: Sequence[Token]) -> bool:
        ttl_s = self._keeping.ttl_s
        try:
            return await shared.append(self._key, position, tokens, ttl_s, self._lease)
        except Gap:
            # Expired or evicted meanwhile, or the store began anew.
            return await shared.append(self._key, 0, [*self.tokens[:position], *tokens], ttl_s, self._lease)

    async def _renew(self, lease: Lease) -> None:
        """Keep the lease while the backend is at work. Whether it was lost the next append says."""
        assert self._shared is not None
        while self._keeping.writes:
            await asyncio.sleep(self._shared.lease_s / RENEWALS)
            with suppress(StoreUnavailable):  # The next time may do better.
                await self._shared.look(self._key, 2**31, lease)

    async def _release(self) -> None:
        if self._claimed and self._lease is not None and self._shared is not None:
            with suppress(StoreUnavailable):  # The lease ends by itself.
                await self._shared.release(self._key, self._lease)
            self._claimed = False
