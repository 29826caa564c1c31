"""What the engine asks of the C library's allocator."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource, sys
from backend.engine.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def take_and_free():
    taken = [c.malloc(4 << 20) for _ in range(8)]
    for at in taken:
        ctypes.memset(at, 1, 4 << 20)
    for at in reversed(taken):
        c.free(ctypes.c_void_p(at))

for _ in range(4):
    take_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is not glibc")
def test_memory_that_was_freed_is_not_taken_anew_from_the_system() -> None:
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", _FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 32 MiB are 8,192 pages of 4 KiB.
    assert faults("kept") < 100 < faults("as it is")


_POOL = """
import resource, threading
from dataclasses import replace

import torch

from backend.engine.kv_pool import KvPool
from backend.engine.memory import keep_freed_memory
from tests.backend.harness import TINY

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def build():
    keep_freed_memory()
    config = replace(TINY, layers=32)
    before = resident()
    pool = KvPool(config, torch.bfloat16, 4096)
    print(resident() - before)

# The engine is built by another thread than the main one, whose memory comes from heaps of its own.
thread = threading.Thread(target=build)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_kv_cache_takes_memory_only_where_it_is_written_to() -> None:
    done = subprocess.run([sys.executable, "-c", _POOL], capture_output=True, text=True, check=True)
    # The pool is of 768 MiB.
    assert int(done.stdout) < 32 << 20
