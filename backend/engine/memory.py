"""Memory that the process holds without needing it, and what it had better hold on to."""

from __future__ import annotations

import ctypes
import os

_KERNELS_KEPT = 128
# Parameters of mallopt, as malloc.h numbers them, and what they are set to, in bytes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 256 << 20
_HEAP_BYTES = 64 << 20
_MAPPED_BYTES = 32 << 20


def give_back() -> None:
    """Return freed memory to the system: the C library keeps the checkpoint's pages once its weights are packed.

    Does nothing where the C library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep up to 256 MiB that was freed, for the next pass. Does nothing where the C library has no such call.

    By default glibc gives a megabyte or more back at once, and takes it again zeroed, page by page, in every layer of
    every pass: with 16 sequences of 700 tokens that was four fifths of a decoding pass. The padding keeps the heaps of
    other threads than the main one, which are of 64 MiB at most, from being unmapped when they run empty.
    """
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is not None:
        set_parameter(_MMAP_THRESHOLD, _MAPPED_BYTES)
        set_parameter(_TRIM_THRESHOLD, _KEPT_BYTES)
        set_parameter(_TOP_PAD, _HEAP_BYTES)


def bound_kernel_caches() -> None:
    """Keep at most the 128 kernels used last, in each of two caches, unless the environment says otherwise.

    oneDNN and PyTorch's layer above it compile a kernel for every number of rows that a weight is multiplied by, about
    0.4 MB each, and keep 1,024 of them each. A pass of a few sequences needs five. To be called before the first
    product: both libraries read the environment then.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(_KERNELS_KEPT))
