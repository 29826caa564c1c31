"""What the launchers of all kernels share: aligned operands, rounding as written, and the one matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ALIGNMENT = 16
"""Bytes. Triton compiles other code for pointers that are not aligned to it."""

FP_FUSION = False
"""Whether the compiler may fuse products into sums. Said at each launch: the default changes between versions."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this module was imported)."""


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a b, accumulated in float32; float32 operands keep all their bits."""
    if INTERPRETED:
        # The interpreter multiplies bfloat16's bit patterns as integers, and float32 by a library whose rows depend on
        # their place in the tile.
        total += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x where it is contiguous and aligned, else a copy that is."""
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
