"""Logs of all gateways together, in Redis: a list of entries for each, and who generates it now.

One script an operation, so each is atomic. Both keys of a log share a hash tag, so a cluster keeps them in one slot.
What is appended has to agree with what stands, entry by entry, whoever appends it: a writer that lost its lease without
knowing can do no harm.

A lease holds the token of whoever generates the log. The token is drawn, not counted: a Redis that restarts empty
would count from the beginning again. It ends by itself; who finds it ended may take it and goes on at the log's end.

Where Redis is in trouble every operation raises `StoreUnavailable` within the deadline. After a few of these a breaker
opens, and they do so at once. What is of another type than written is thrown away; what was damaged is cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.commands.core import AsyncScript

from gateway.breaker import Breaker
from gateway.commit_log.entry import CHECK_BYTES, Damaged, decode, encode
from gateway.commit_log.memory import Conflict, Gap
from gateway.domain import Token
from gateway.redis_connection import RedisConnection, StoreUnavailable

LEASE_MS = 3000
"""How long a leader may be silent before somebody else generates in its place."""

_PREFIX, _SUFFIX = "verbatim:log:{", "}"

_OWN = """
local function own(key, kind)
  local found = redis.call('TYPE', key)['ok']
  if found == kind then return true end
  if found ~= 'none' then redis.call('DEL', key) end
  return false
end
"""

LOOK = (
    _OWN
    + """
-- KEYS: log, lease. ARGV: first position, token ('' claims nothing), lease_ms.
-- Answers whether the token's owner leads, how long the log is kept, its entries from the first position on.
local leads = 0
if ARGV[2] ~= '' then
  local holder = own(KEYS[2], 'string') and redis.call('GET', KEYS[2])
  leads = (not holder or holder == ARGV[2]) and 1 or 0
  -- A Redis that cannot write cannot lease: its readers lead, each for itself.
  if leads == 1 then redis.pcall('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
end
if not own(KEYS[1], 'list') then return {leads, 0, {}} end
return {leads, redis.call('PTTL', KEYS[1]), redis.call('LRANGE', KEYS[1], ARGV[1], -1)}
"""
)

APPEND = (
    _OWN
    + """
-- KEYS: log, lease. ARGV: position, ttl_ms, token, lease_ms, then the entries.
-- Answers 'gap', the log's length; 'conflict', where, what stands there; or 'stands', whether the owner leads.
local position = tonumber(ARGV[1])
local count = #ARGV - 4
local length = own(KEYS[1], 'list') and redis.call('LLEN', KEYS[1]) or 0
if position > length then return {'gap', length} end
local standing = redis.call('LRANGE', KEYS[1], position, position + count - 1)
for i = 1, #standing do
  local old, new = standing[i]:sub(CHECK_BYTES + 1), ARGV[4 + i]:sub(CHECK_BYTES + 1)
  local both = math.min(#old, #new)
  if old:sub(1, both) ~= new:sub(1, both) then return {'conflict', position + i - 1, standing[i]} end
end
for i = 1, count do
  if i > #standing then
    redis.call('RPUSH', KEYS[1], ARGV[4 + i])
  elseif #ARGV[4 + i] > #standing[i] then
    redis.call('LSET', KEYS[1], position + i - 1, ARGV[4 + i])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] == '' then return {'stands', 0} end
local holder = own(KEYS[2], 'string') and redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[3] then return {'stands', 0} end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return {'stands', 1}
""".replace("CHECK_BYTES", str(CHECK_BYTES))
)

RELEASE = (
    _OWN
    + """
-- KEYS: lease. ARGV: token.
if own(KEYS[1], 'string') and redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
)

CUT = (
    _OWN
    + """
-- KEYS: log. ARGV: position, the entry that stands there.
if own(KEYS[1], 'list') and redis.call('LINDEX', KEYS[1], ARGV[1]) == ARGV[2] then
  if ARGV[1] == '0' then redis.call('DEL', KEYS[1]) else redis.call('LTRIM', KEYS[1], 0, ARGV[1] - 1) end
end
"""
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """A log from some position on, for how long it is kept, and whether whoever looked leads now."""

    tokens: tuple[Token, ...]
    ttl_s: float
    leads: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """The wish to generate a log. With another number of alternatives it is another work, and another leader's."""

    token: str
    top_logprobs: int


class RedisLogs:
    """Logs behind a connection. `unanswered` counts the calls that Redis did not answer, `damaged` the cut logs.

    `clock` counts seconds.
    """

    def __init__(self, connection: RedisConnection, clock: Callable[[], float], lease_ms: int = LEASE_MS) -> None:
        self.connection = connection
        self.lease_s = lease_ms / 1000
        self._lease_ms = lease_ms
        self._clock = clock
        self._breaker = Breaker()
        self._answers = True
        self._look = connection.redis.register_script(LOOK)
        self._append = connection.redis.register_script(APPEND)
        self._release = connection.redis.register_script(RELEASE)
        self._cut = connection.redis.register_script(CUT)
        self.unanswered = 0
        self.damaged = 0

    def __repr__(self) -> str:
        return f"<RedisLogs {self._breaker!r} unanswered={self.unanswered} damaged={self.damaged}>"

    @property
    def breaker_state(self) -> str:
        return self._breaker.state(self._clock())

    async def look(self, key: bytes, start: int, lease: Lease | None) -> Look:
        """What stands from `start` on; with a lease, lead or find out that somebody else does."""
        token = "" if lease is None else lease.token
        leads, ttl_ms, entries = await self._call(self._look, _keys(key, lease), start, token, self._lease_ms)
        tokens: list[Token] = []
        try:
            for index, entry in enumerate(entries):
                tokens.append(decode(key, start + index, entry))  # those before a damaged one count
        except Damaged as damage:
            await self._repair(key, damage.position, entries[len(tokens)])
        return Look(tuple(tokens), ttl_ms / 1000, bool(leads))

    async def append(
        self, key: bytes, position: int, tokens: Sequence[Token], ttl_s: float, lease: Lease | None
    ) -> bool:
        """Have `tokens` stand from `position` on, all or none; whether whoever holds the lease still leads.

        Raises `Conflict`, or `Gap` where the log is shorter.
        """
        assert tokens
        entries = [encode(key, position + index, token) for index, token in enumerate(tokens)]
        token = "" if lease is None else lease.token
        arguments: tuple[str | int | bytes, ...] = (position, int(ttl_s * 1000), token, self._lease_ms, *entries)
        said, *more = await self._call(self._append, _keys(key, lease), *arguments)
        match said:
            case b"gap":
                raise Gap(more[0])
            case b"conflict":
                at, stands = more
                try:
                    decode(key, at, stands)
                except Damaged:
                    await self._repair(key, at, stands)
                    return await self.append(key, position, tokens, ttl_s, lease)
                raise Conflict(at)
        return bool(more[0])

    async def release(self, key: bytes, lease: Lease) -> None:
        """Let somebody else lead."""
        await self._call(self._release, _keys(key, lease)[1:], lease.token)

    async def _repair(self, key: bytes, position: int, entry: bytes) -> None:
        """Cut a log off before an entry that is not what was written there."""
        self.damaged += 1
        log.error("an entry of a commit log in Redis was damaged; the log is cut off before it")
        await self._call(self._cut, _keys(key, None)[:1], position, entry)

    async def _call(self, script: AsyncScript, keys: list[str], *arguments: str | int | bytes) -> list:  # type: ignore[type-arg]
        now = self._clock()
        if not self._breaker.allows(now):
            raise StoreUnavailable("it keeps failing")
        self._breaker.begin(now)
        try:
            async with self.connection.answering():
                answer: list = await script(keys=keys, args=arguments)  # type: ignore[type-arg]
        except StoreUnavailable as error:
            self._breaker.settled()
            self._breaker.failed(self._clock())
            self.unanswered += 1
            if self._answers:  # said once, not for every request of an outage
                self._answers = False
                log.error("the commit log in Redis does not answer (%s); requests go on without it", error)
            raise
        except BaseException:
            self._breaker.settled()
            raise
        self._breaker.succeeded()
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
