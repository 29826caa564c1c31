"""Who may run: places and KV memory for the engine's tasks, without tensors, clock or threads.

Two kinds of tasks wait in queues of their own. *Calls* (verify, draft) are short and come to need a known number of
blocks, which they get at once, so that a call that runs always ends. *Streams* can be long: they start with room for
what they have and a block more, and grow block by block. A stream with a batch of one counts as a call: resumed, it
would compute its prompt and its answer together, which gives other bits; for the same reason it reuses nothing cached.

The rules by which neither kind starves:
- Each kind has a quarter of the places for itself; the rest goes to who comes first.
- Calls do not wait for streams: where memory is short, a call takes it from the youngest streams, until these are down
  to a quarter of the blocks. A stream is left alone until it has produced a block of tokens since it was let in.
- A stream that cannot grow takes memory from the youngest stream, which may be itself.
- Streams do not overtake a call that waits for memory. While a stream waits, calls leave it a quarter of the blocks;
  and once `_PATIENCE` calls have passed it, no call is let in before it.
- A stream that loses its memory goes back to the head of its queue. It resumes from its tokens; what is still cached
  of them is not computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeGuard

from backend.engine.prefix_cache import PrefixCache
from backend.engine.tasks import DecodeTask, Task

_PATIENCE = 64


class QueueFullError(Exception):
    """The queues of tasks that wait for memory or a place are at their bound."""


@dataclass(slots=True)
class Changes:
    """Tasks that began to run, streams that had to stop, and blocks to be cleared before they are written."""

    admitted: list[Task] = field(default_factory=list)
    preempted: list[DecodeTask] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


class Admission:
    """Owns every task's lease, and the tasks that wait for one."""

    def __init__(self, cache: PrefixCache, max_running: int, max_waiting: int):
        self._cache = cache
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._calls: deque[Task] = deque()
        self._streams: deque[DecodeTask] = deque()
        self._running: dict[Task, int] = {}  # Oldest first, with the number of tokens each had when it was let in.
        self._passed = 0  # Calls let in while the first stream waited.
        self.preemptions = 0

    def __repr__(self) -> str:
        return f"<Admission running={len(self._running)} calls={len(self._calls)} streams={len(self._streams)}>"

    @property
    def running(self) -> Collection[Task]:
        """Tasks that hold a lease, oldest first."""
        return self._running.keys()

    @property
    def waiting(self) -> int:
        """Tasks that wait for one."""
        return len(self._calls) + len(self._streams)

    def submit(self, task: Task) -> None:
        """Queue a task. Raises QueueFullError past the bound."""
        if self.waiting >= self._max_waiting:
            raise QueueFullError(f"{self._max_waiting} calls are waiting already")
        if _is_stream(task):
            self._streams.append(task)
        else:
            self._calls.append(task)

    def end(self, task: Task) -> None:
        """Take a task out, wherever it is; what it computed stays cached."""
        if task.lease is not None:
            self._release(task)
        elif _is_stream(task):
            self._streams.remove(task)
        else:
            self._calls.remove(task)

    def admit(self) -> Changes:
        """Let in who can be let in now."""
        changes = Changes()
        while self._calls and self._has_place(streams=False) and not self._owes_streams(self._calls[0]):
            call = self._calls[0]
            if not self._acquire(call):
                victims = self._preemptable(call)
                if not victims:
                    return changes
                for stream in victims:
                    self._preempt(stream, changes)
                continue
            changes.admitted.append(self._calls.popleft())
            self._passed += bool(self._streams)
        while self._streams and self._has_place(streams=True) and not changes.preempted:
            if not self._acquire(self._streams[0]):
                break
            changes.admitted.append(self._streams.popleft())
            self._passed = 0
        return changes

    def make_room(self, streams: list[DecodeTask]) -> Changes:
        """Give each of these running streams, oldest first, a block for its next row; some may be preempted for it."""
        changes = Changes()
        for stream in streams:
            while stream.lease is not None and stream.computed >= len(stream.lease.blocks) * self._cache.block_size:
                block = self._cache.grow(stream.lease)
                if block is None:
                    self._preempt(next(task for task in reversed(self._running) if _is_stream(task)), changes)
                else:
                    changes.fresh.append(block)
        return changes

    def _has_place(self, streams: bool) -> bool:
        same_kind = sum(_is_stream(task) == streams for task in self._running)
        return len(self._running) < self._max_running and same_kind < self._max_running - self._max_running // 4

    def _owes_streams(self, call: Task) -> bool:
        """Whether this call would take the quarter of memory that is due to streams which wait."""
        if not self._streams or not self._has_place(streams=True):
            return False
        room = self._cache.total - self._blocks(streams=True)
        if self._passed >= _PATIENCE and self._needs(self._streams[0]) <= room:
            return True  # Only calls are in its way.
        held = self._blocks(streams=False)
        # Alone a call may have everything; else nothing would ever begin.
        return held > 0 and held + self._needs(call) > self._cache.total - self._cache.total // 4

    def _needs(self, task: Task) -> int:
        """Blocks that a waiting task needs to be let in, if nothing of it is cached."""
        return -(-self._capacity(task) // self._cache.block_size)

    def _capacity(self, task: Task) -> int:
        return min(len(task.tokens) + self._cache.block_size, task.capacity) if _is_stream(task) else task.capacity

    def _preemptable(self, call: Task) -> list[DecodeTask]:
        """The streams to preempt, youngest first, so that the call fits; none where that would not suffice."""
        victims: list[DecodeTask] = []
        missing = self._needs(call) - self._cache.available
        spare = self._blocks(streams=True) - self._cache.total // 4
        for task, tokens in reversed(self._running.items()):
            if missing <= 0 or spare <= 0:
                break
            if _is_stream(task) and len(task.tokens) - tokens >= self._cache.block_size:
                assert task.lease is not None
                victims.append(task)
                missing -= len(task.lease.blocks)
                spare -= len(task.lease.blocks)
        return victims if missing <= 0 else []

    def _blocks(self, streams: bool) -> int:
        leases = [task.lease for task in self._running if _is_stream(task) == streams]
        return len({block for lease in leases if lease is not None for block in lease.blocks})

    def _acquire(self, task: Task) -> bool:
        tokens = task.tokens
        if isinstance(task, DecodeTask) and task.batching == "none":
            tokens = []
        task.lease = self._cache.acquire(tokens, self._capacity(task), prefer_fixed=task.in_fixed_lane)
        if task.lease is not None:
            self._running[task] = len(task.tokens)
        return task.lease is not None

    def _preempt(self, stream: DecodeTask, changes: Changes) -> None:
        self.preemptions += 1
        self._release(stream)
        self._streams.appendleft(stream)
        changes.preempted.append(stream)

    def _release(self, task: Task) -> None:
        assert task.lease is not None
        del self._running[task]
        self._cache.release(task.lease, task.tokens[: task.valid], task.fixed)
        task.lease = None


def _is_stream(task: Task) -> TypeGuard[DecodeTask]:
    return isinstance(task, DecodeTask) and not task.is_draft and task.batching != "none"
