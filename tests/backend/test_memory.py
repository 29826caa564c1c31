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
