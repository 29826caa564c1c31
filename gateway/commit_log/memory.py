"""Logs in this process's memory, packed and bounded in bytes: those used longest ago go first.

Owns what `append` may do to a log: go on at its end, or say again what stands; never change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gateway.commit_log.packing import agree, pack, richer, unpack
from gateway.domain import Token

LOG_BYTES = 420
PIECE_BYTES = 110
"""What a log and a piece of it take in memory beside its packed tokens; measured with tracemalloc on CPython 3.11."""
PIECES = 16
"""A log of more pieces is made one."""


class Conflict(Exception):
    """Tokens at `position` disagree with what stands there. One of the two was computed wrong."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the tokens from position {position} on are not those that stand in the log")
        self.position = position


class Gap(Exception):
    """The log ends at `length`, before the tokens to append begin."""

    def __init__(self, length: int) -> None:
        super().__init__(f"the log ends at {length}")
        self.length = length


@dataclass(slots=True)
class _Log:
    """Pieces are packed tokens, each with their number."""

    expires_at: float = 0.0
    length: int = 0
    pieces: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return LOG_BYTES + sum([PIECE_BYTES + len(packed) for _, packed in self.pieces])

    def tokens(self) -> list[Token]:
        return list(chain.from_iterable([unpack(packed, count) for count, packed in self.pieces]))

    def add(self, tokens: Sequence[Token]) -> None:
        self.pieces.append((len(tokens), pack(tokens)))
        self.length += len(tokens)
        if len(self.pieces) > PIECES:
            self.become(self.tokens())

    def become(self, tokens: Sequence[Token]) -> None:
        self.pieces = [(len(tokens), pack(tokens))]
        self.length = len(tokens)


class MemoryLogs:
    """Logs by key. `clock` counts seconds."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._logs: OrderedDict[bytes, _Log] = OrderedDict()
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<MemoryLogs {len(self._logs)} logs, {self.bytes} of {self.max_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._logs)

    def read(self, key: bytes) -> Sequence[Token]:
        """What stands, from the first token on; nothing where there is no log."""
        log = self._find(key)
        return () if log is None else log.tokens()

    def append(self, key: bytes, position: int, tokens: Sequence[Token], ttl_s: float) -> None:
        """Have `tokens` stand from `position` on, for `ttl_s` from now: all of them, or an error and no change.

        Saying again what stands changes nothing but the alternatives known. Raises `Conflict`, or `Gap`.
        """
        if not self.max_bytes:
            return  # Nothing stands and nothing will.
        log = self._find(key) or _Log()
        if position > log.length:
            raise Gap(log.length)
        before = log.size if log.pieces else 0
        if position == log.length:
            log.add(tokens)
        else:
            stands = log.tokens()
            merged = merge(stands, position, tokens)
            if merged != stands:
                log.become(merged)
        log.expires_at = self._clock() + ttl_s
        self._logs[key] = log
        self.bytes += log.size - before
        while self.bytes > self.max_bytes:
            self.drop(next(iter(self._logs)))

    def purge(self, selects: Callable[[bytes], bool]) -> int:
        """Forget the logs whose keys are selected; how many."""
        chosen = [key for key in self._logs if selects(key)]
        for key in chosen:
            self.drop(key)
        return len(chosen)

    def drop(self, key: bytes) -> None:
        """Forget a log."""
        log = self._logs.pop(key, None)
        if log is not None:
            self.bytes -= log.size

    def _find(self, key: bytes) -> _Log | None:
        log = self._logs.get(key)
        if log is not None and log.expires_at <= self._clock():
            self.drop(key)
            return None
        if log is not None:
            self._logs.move_to_end(key)
        return log


def merge(stands: Sequence[Token], position: int, tokens: Sequence[Token]) -> list[Token]:
    """What stands once `tokens` do, too, from a `position` on that is no gap; raises `Conflict`."""
    both = list(zip(stands[position:], tokens, strict=False))
    for index, pair in enumerate(both):
        if not agree(*pair):
            raise Conflict(position + index)
    end = position + len(tokens)
    return [*stands[:position], *[richer(*pair) for pair in both], *tokens[len(both) :], *stands[end:]]
