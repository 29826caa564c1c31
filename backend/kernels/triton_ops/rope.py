"""Rotary embedding in the rotate-half layout.

Why a row's result depends on that row alone. Each element is one fixed expression of a pair of elements and its angle.
PyTorch's elementwise ops hold that on a GPU as well; this is one kernel where they are six, and the same code for
every number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.kernels.triton_ops.launch import FP_FUSION


@triton.jit(do_not_specialize=["row_stride"])
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    row_stride: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < HEADS) & (half < D // 2)
    place = head * D + half
    low = tl.load(x + row * row_stride + place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + row * row_stride + place + D // 2, mask=mask, other=0.0).to(tl.float32)
    angle = row * D + half
    in_half = half < D // 2
    cos_low = tl.load(cos + angle, mask=in_half, other=0.0)
    sin_low = tl.load(sin + angle, mask=in_half, other=0.0)
    cos_high = tl.load(cos + angle + D // 2, mask=in_half, other=0.0)
    sin_high = tl.load(sin + angle + D // 2, mask=in_half, other=0.0)
    out = y + row * HEADS * D + place
    tl.store(out, (low * cos_low - high * sin_low).to(y.dtype.element_ty), mask=mask)
    tl.store(out + D // 2, (high * cos_high + low * sin_high).to(y.dtype.element_ty), mask=mask)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [N, heads, D] by the float32 angles cos, sin [N, 1, D]; in x's dtype. Rows of x may lie apart."""
    rows, heads, d = x.shape
    assert cos.shape == sin.shape == (rows, 1, d) and d % 2 == 0
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    if x.stride()[1:] != (d, 1):
        x = x.contiguous()
    y = torch.empty((rows, heads, d), dtype=x.dtype, device=x.device)
    rope_kernel[(rows,)](
        x,
        cos,
        sin,
        y,
        x.stride(0),
        HEADS=heads,
        D=d,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_HALF=triton.next_power_of_2(d // 2),
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )
    return y
