"""Memory that the process holds without needing it."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed memory to the system: the C library keeps the checkpoint's pages once its weights are packed.

    Does nothing where the C library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
