"""Logs of all gateways together, in Redis: a list of blocks for each, and who generates it now.

One script an operation, so each is atomic. Both keys of a log share a hash tag, so a cluster keeps them in one slot.

A log is a list of blocks (sealing.py), each with the tokens behind those of the block before. Scripts read no more of a
block than its head, which says what positions it has; what it holds they could not compare, for it may be encrypted.
So an append goes to the log's end or is not done: who appends what others have appended already gets their blocks to
compare with. Tokens that stand never change, so nothing can happen in between that would make this wrong. A log in many
pieces is made one by the first who reads it so; a rewrite is done only if the log is still what its author has read.

A lease holds the token of whoever generates the log. The token is drawn, not counted: a Redis that restarts empty
would count from the beginning again. It ends by itself; who finds it ended may take it and goes on at the log's end.

Where Redis is in trouble every operation raises `StoreUnavailable` within the deadline. After a few of these a breaker
opens, and they do so at once. What is of another type than written is thrown away; what was damaged is cut off. What
only another gateway can read, because it has other keys, is left alone, and the log is not used here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.breaker import Breaker
from gateway.commit_log.memory import Gap, merge
from gateway.commit_log.sealing import Block, Checked, Damaged, Foreign, Sealer
from gateway.domain import Token
from gateway.redis_connection import Argument, RedisConnection, Script, StoreUnavailable, guarded

LEASE_MS = 3000
"""How long a leader may be silent before somebody else generates in its place."""
PIECES = 8
"""A log of more blocks is made one by who reads it."""

_PREFIX, _SUFFIX = "verbatim:log:{", "}"

_OWN = """
local function own(key, kind)
  local found = redis.call('TYPE', key)['ok']
  if found == kind then return true end
  if found ~= 'none' then redis.call('DEL', key) end
  return false
end
-- The position of a block's first token, and the one behind its last. What is no block ends behind any position, so
-- whoever wants to append gets to see it.
local function begins(block) return #block < 9 and 0 or (struct.unpack('<I4', block, 2)) end
local function ends(block)
  if #block < 9 then return 4294967295 end
  local position, count = struct.unpack('<I4I4', block, 2)
  return position + count
end
"""

LOOK = Script(
    _OWN
    + """
-- KEYS: log, lease. ARGV: first position, token ('' claims nothing), lease_ms.
-- Answers whether the token's owner leads, how long the log is kept, and its blocks, from the first position's on.
local leads = 0
if ARGV[2] ~= '' then
  local holder = own(KEYS[2], 'string') and redis.call('GET', KEYS[2])
  leads = (not holder or holder == ARGV[2]) and 1 or 0
  -- A Redis that cannot write cannot lease: its readers lead, each for itself.
  if leads == 1 then redis.pcall('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
end
if not own(KEYS[1], 'list') then return {leads, 0, {}} end
local ttl, first = redis.call('PTTL', KEYS[1]), tonumber(ARGV[1])
if first == 0 then return {leads, ttl, redis.call('LRANGE', KEYS[1], 0, -1)} end
local index = -1
local block = redis.call('LINDEX', KEYS[1], index)
if ends(block) <= first then return {leads, ttl, {}} end
while block and begins(block) > first do
  index = index - 1
  block = redis.call('LINDEX', KEYS[1], index)
end
return {leads, ttl, redis.call('LRANGE', KEYS[1], index, -1)}
"""
)

APPEND = Script(
    _OWN
    + """
-- KEYS: log, lease. ARGV: position, ttl_ms, token, lease_ms, block ('' renews the log, which must end there).
-- Answers 'gap', the log's length; 'stands', whether the token's owner leads; or 'overlap', the log's blocks.
local position = tonumber(ARGV[1])
local length = own(KEYS[1], 'list') and ends(redis.call('LINDEX', KEYS[1], -1)) or 0
if position > length then return {'gap', length} end
if position < length then return {'overlap', redis.call('LRANGE', KEYS[1], 0, -1)} end
if ARGV[5] ~= '' then redis.call('RPUSH', KEYS[1], ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] == '' then return {'stands', 0} end
local holder = own(KEYS[2], 'string') and redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[3] then return {'stands', 0} end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return {'stands', 1}
"""
)

REWRITE = Script(
    _OWN
    + """
-- KEYS: log. ARGV: digest of the log's blocks, block.
-- Makes the log that one block if it has not changed. One that cannot be written stays as it is.
if not own(KEYS[1], 'list') then return end
local blocks = redis.call('LRANGE', KEYS[1], 0, -1)
if redis.sha1hex(table.concat(blocks)) ~= ARGV[1] then return end
local pushed = redis.pcall('RPUSH', KEYS[1], ARGV[2])
if type(pushed) == 'number' then redis.call('LTRIM', KEYS[1], #blocks, -1) end
"""
)

CUT = Script(
    _OWN
    + """
-- KEYS: log. ARGV: index, the block that stands there.
if own(KEYS[1], 'list') and redis.call('LINDEX', KEYS[1], ARGV[1]) == ARGV[2] then
  if ARGV[1] == '0' then redis.call('DEL', KEYS[1]) else redis.call('LTRIM', KEYS[1], 0, ARGV[1] - 1) end
end
"""
)

RELEASE = Script(
    _OWN
    + """
-- KEYS: lease. ARGV: token.
if own(KEYS[1], 'string') and redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """A log from some position on, for how long it is kept, and whether whoever looked leads now."""

    tokens: Sequence[Token]
    ttl_s: float
    leads: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """The wish to generate a log. With another number of alternatives it is another work, and another leader's."""

    token: str
    top_logprobs: int


class RedisLogs:
    """Logs behind a connection. `unanswered` counts the calls that Redis did not answer, `damaged` the cut logs,
    `foreign` the times that a log was not used because others wrote it under keys that are not known here.

    `clock` counts seconds.
    """

    def __init__(
        self,
        connection: RedisConnection,
        clock: Callable[[], float],
        lease_ms: int = LEASE_MS,
        sealer: Sealer | None = None,
    ) -> None:
        self.connection = connection
        self.lease_s = lease_ms / 1000
        self._lease_ms = lease_ms
        self._clock = clock
        self._sealer = sealer or Checked()
        self._breaker = Breaker()
        self._answers = True
        self.unanswered = 0
        self.damaged = 0
        self.foreign = 0

    def __repr__(self) -> str:
        counts = f"unanswered={self.unanswered} damaged={self.damaged} foreign={self.foreign}"
        return f"<RedisLogs {self._breaker!r} {counts}>"

    @property
    def breaker_state(self) -> str:
        return self._breaker.state(self._clock())

    async def look(self, key: bytes, start: int, lease: Lease | None) -> Look:
        """What stands from `start` on; with a lease, lead or find out that somebody else does.

        Raises `StoreUnavailable`, also for a log that only others can read.
        """
        token = "" if lease is None else lease.token
        leads, ttl_ms, sealed = await self._call(LOOK, _keys(key, lease), start, token, self._lease_ms)
        blocks = self._open(key, sealed, None if start else 0)
        damaged = len(blocks) < len(sealed)
        if start and (damaged or (blocks and blocks[0].position > start)):
            # Where the damage begins is told by the whole log.
            look = await self.look(key, 0, lease)
            return Look(look.tokens[start:], look.ttl_s, look.leads)
        if damaged:
            await self._repair(key, len(blocks), sealed[len(blocks)])
        tokens = [token for block in blocks for token in block.tokens]
        if start == 0 and len(blocks) > PIECES:
            await self._rewrite(key, sealed[: len(blocks)], tokens)
        return Look(tokens[start - blocks[0].position :] if blocks else (), ttl_ms / 1000, bool(leads))

    async def append(
        self, key: bytes, position: int, tokens: Sequence[Token], ttl_s: float, lease: Lease | None
    ) -> bool:
        """Have `tokens` stand from `position` on, all or none; whether whoever holds the lease still leads.

        Raises `Conflict`, `Gap` where the log is shorter, or `StoreUnavailable`.
        """
        token = "" if lease is None else lease.token
        while True:
            sealed = self._sealer.seal(key, Block(position, tokens)) if tokens else b""
            said, answer = await self._call(
                APPEND, _keys(key, lease), position, int(ttl_s * 1000), token, self._lease_ms, sealed
            )
            match said:
                case b"gap":
                    raise Gap(answer)
                case b"stands":
                    return bool(answer)
            position, tokens = await self._append_behind(key, answer, position, tokens)

    async def release(self, key: bytes, lease: Lease) -> None:
        """Let somebody else lead."""
        await self._call(RELEASE, _keys(key, lease)[1:], lease.token)

    async def _append_behind(
        self, key: bytes, sealed: list[bytes], position: int, tokens: Sequence[Token]
    ) -> tuple[int, Sequence[Token]]:
        """Compare with what stands; what is left to append, and where."""
        blocks = self._open(key, sealed, 0)
        stands = [token for block in blocks for token in block.tokens]
        if len(blocks) < len(sealed):
            await self._repair(key, len(blocks), sealed[len(blocks)])
            if len(stands) <= position:
                return position, tokens
        merged = merge(stands, position, tokens)
        if merged[: len(stands)] != stands:
            await self._rewrite(key, sealed[: len(blocks)], merged[: len(stands)])
        return len(stands), merged[len(stands) :]

    def _open(self, key: bytes, sealed: Sequence[bytes], position: int | None) -> list[Block]:
        """The blocks up to one that is damaged or out of place, the first of which has to begin at `position`.

        Raises `StoreUnavailable` for one that only others can read.
        """
        blocks: list[Block] = []
        for one in sealed:
            try:
                block = self._sealer.open(key, one)
            except Damaged:
                break
            except Foreign as error:
                self.foreign += 1
                raise StoreUnavailable(f"a log is not readable here: {error}") from error
            if position is not None and block.position != position:
                break
            position = block.position + len(block.tokens)
            blocks.append(block)
        return blocks

    async def _rewrite(self, key: bytes, sealed: Sequence[bytes], tokens: Sequence[Token]) -> None:
        """Make a log that consists of these blocks one of these tokens, unless somebody else was faster."""
        digest = hashlib.sha1(b"".join(sealed), usedforsecurity=False).hexdigest()
        await self._call(REWRITE, _keys(key, None)[:1], digest, self._sealer.seal(key, Block(0, tokens)))

    async def _repair(self, key: bytes, index: int, sealed: bytes) -> None:
        """Cut a log off before a block that is not what was written there."""
        self.damaged += 1
        log.error("a block of a commit log in Redis was damaged; the log is cut off before it")
        await self._call(CUT, _keys(key, None)[:1], index, sealed)

    async def _call(self, script: Script, keys: list[str], *arguments: Argument) -> Any:
        with guarded(self._breaker, self._clock):
            try:
                answer = await self.connection.run(script, keys, arguments)
            except StoreUnavailable as error:
                self.unanswered += 1
                if self._answers:  # said once, not for every request of an outage
                    self._answers = False
                    log.error("the commit log in Redis does not answer (%s); requests go on without it", error)
                raise
        if not self._answers:
            self._answers = True
            log.warning("the commit log in Redis answers again")
        return answer


def log_name(key: str) -> str:
    """What a log is called in Redis by its key in hexadecimal; of a pattern of keys, the pattern of names."""
    return f"{_PREFIX}{key}{_SUFFIX}"


def key_of(name: bytes) -> bytes:
    """The key of the log that is called so."""
    return bytes.fromhex(name.decode().removeprefix(_PREFIX).removesuffix(_SUFFIX))


def _keys(key: bytes, lease: Lease | None) -> list[str]:
    name = log_name(key.hex())
    return [name, f"{name}:lead:{0 if lease is None else lease.top_logprobs}"]
