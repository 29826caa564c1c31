"""Logs in this process's memory, bounded in bytes: those used longest ago go first.

Owns what `append` may do to a log: go on at its end, or say again what stands; never change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.commit_log.entry import agree
from gateway.domain import Token

LOG_BYTES = 500
TOKEN_BYTES = 130
ALTERNATIVE_BYTES = 120
"""What a log, a token and an alternative take in memory, at most; measured with tracemalloc on CPython 3.11."""


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
    expires_at: float
    tokens: list[Token] = field(default_factory=list)
    size: int = LOG_BYTES


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
        return () if log is None else tuple(log.tokens)

    def append(self, key: bytes, position: int, tokens: Sequence[Token], ttl_s: float) -> None:
        """Have `tokens` stand from `position` on, for `ttl_s` from now: all of them, or an error and no change.

        Saying again what stands changes nothing but the alternatives known. Raises `Conflict`, or `Gap`.
        """
        log = self._find(key)
        length = 0 if log is None else len(log.tokens)
        if position > length:
            raise Gap(length)
        standing = [] if log is None else log.tokens[position : position + len(tokens)]
        for index, (stands, token) in enumerate(zip(standing, tokens, strict=False)):
            if not agree(stands, token):
                raise Conflict(position + index)
        if log is None:
            log = self._logs[key] = _Log(0.0)
            self.bytes += log.size
        richer = [max(pair, key=lambda token: len(token.top)) for pair in zip(standing, tokens, strict=False)]
        log.tokens[position : position + len(tokens)] = [*richer, *tokens[len(standing) :]]
        log.expires_at = self._clock() + ttl_s
        grown = _size(log.tokens[position : position + len(tokens)]) - _size(standing)
        log.size += grown
        self.bytes += grown
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


def _size(tokens: Sequence[Token]) -> int:
    return sum(TOKEN_BYTES + ALTERNATIVE_BYTES * len(token.top) for token in tokens)
