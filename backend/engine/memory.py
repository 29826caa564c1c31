"""Memory that the process holds without needing it."""

from __future__ import annotations

import ctypes
import os

_KERNELS_KEPT = 128


def give_back() -> None:
    """Return freed memory to the system: the C library keeps the checkpoint's pages once its weights are packed.

    Does nothing where the C library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bound_kernel_caches() -> None:
    """Keep at most the 128 kernels used last, in each of two caches, unless the environment says otherwise.

    oneDNN and PyTorch's layer above it compile a kernel for every number of rows that a weight is multiplied by, about
    0.4 MB each, and keep 1,024 of them each. A pass of a few sequences needs five. To be called before the first
    product: both libraries read the environment then.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(_KERNELS_KEPT))
