"""Limits of all gateways together, in Redis.

One script takes everything a request needs or nothing, by Redis's own clock, so gateways' clocks do not matter. Keys
hold tenants' and rules' names, never a credential. All keys of a call share a hash tag, so a cluster keeps them in one
slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.limits.store import LEASE_WAIT_MS, SLACK_MS, Charge, Lease, Taken
from gateway.redis_connection import Argument, RedisConnection, Script

SCRIPT = Script(
    """
-- KEYS: a bucket for each charge; then the set of leases, where places are asked for.
-- ARGV: number of charges; for each its cost_ms and free_ms; then limit, ttl_ms and the ids of the lease.
-- A bucket is the time in ms at which it will be full. Numbers go back as text: Redis cuts fractions off.
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local charges = tonumber(ARGV[1])
local refused, wait = 0, 0
local behind, cost = {}, {}
for i = 1, charges do
  cost[i] = tonumber(ARGV[2 * i])
  behind[i] = math.max(0, tonumber(redis.call('GET', KEYS[i]) or 0) - now)
  local late = behind[i] - tonumber(ARGV[2 * i + 1])
  if cost[i] > 0 and late > SLACK_MS then
    if refused == 0 then refused = i end
    wait = math.max(wait, late)
  end
end
local leases = KEYS[charges + 1]
local first = 2 * charges + 4
if leases then
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
  local held = redis.call('ZCARD', leases)
  for i = first, #ARGV do
    if not redis.call('ZSCORE', leases, ARGV[i]) then held = held + 1 end
  end
  if held > tonumber(ARGV[first - 2]) then
    if refused == 0 then refused = charges + 1 end
    wait = math.max(wait, LEASE_WAIT_MS)
  end
end
if refused == 0 then
  for i = 1, charges do
    behind[i] = math.max(0, behind[i] + cost[i])
    if behind[i] > 0 then
      redis.call('SET', KEYS[i], string.format('%.6f', now + behind[i]), 'PX', math.ceil(behind[i]) + 1000)
    else
      redis.call('DEL', KEYS[i])
    end
  end
  if leases then
    local ttl = tonumber(ARGV[first - 1])
    for i = first, #ARGV do redis.call('ZADD', leases, now + ttl, ARGV[i]) end
    redis.call('PEXPIRE', leases, ttl)
  end
end
local answer = {refused, string.format('%.6f', wait)}
for i = 1, charges do answer[i + 2] = string.format('%.6f', behind[i]) end
return answer
""".replace("LEASE_WAIT_MS", str(LEASE_WAIT_MS)).replace("SLACK_MS", str(SLACK_MS))
)

GIVE_BACK = Script("redis.call('ZREM', KEYS[1], unpack(ARGV))  -- KEYS: the set of leases. ARGV: the ids of one.")
"""A script, as what takes a lease is one: scripts run in the order of their calls, so none is taken behind it."""


class RedisStore:
    """Buckets and leases behind a connection."""

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection

    def __repr__(self) -> str:
        return "<RedisStore>"

    async def take(self, charges: Sequence[Charge], lease: Lease | None) -> Taken:
        refused, wait_ms, *until_full_ms = await self._run(charges, lease)
        index = None if refused == 0 else int(refused) - 1
        return Taken(index, float(wait_ms), tuple(map(float, until_full_ms)))

    async def give_back(self, charges: Sequence[Charge], lease: Lease | None) -> None:
        if charges:
            await self._run(charges, None)
        if lease is not None:
            await self.connection.run(GIVE_BACK, [lease.key], lease.ids)

    async def _run(self, charges: Sequence[Charge], lease: Lease | None) -> list[bytes | int]:
        keys = [charge.key for charge in charges]
        arguments: list[Argument] = [len(charges)]
        for charge in charges:
            arguments += (repr(charge.cost_ms), repr(charge.free_ms))
        if lease is not None:
            keys.append(lease.key)
            arguments += (lease.limit, lease.ttl_ms, *lease.ids)
        answer: list[bytes | int] = await self.connection.run(SCRIPT, keys, arguments)
        return answer
