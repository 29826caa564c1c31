"""RMSNorm.

Why a row's result depends on that row alone. One program holds one row; the sum of squares is a tree whose shape is
fixed by the row's length and the number of warps. PyTorch's own reduction chooses its shape by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.kernels.triton_ops.launch import FP_FUSION, aligned

_WIDE = 4096


@triton.jit
def rms_norm_kernel(
    x: tl.tensor, weight: tl.tensor, y: tl.tensor, EPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, BLOCK_D)
    wide = tl.load(x + row + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + EPS)
    normal = wide * scale * tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(y + row + d, normal.to(y.dtype.element_ty), mask=d < D)


def warps(d: int) -> int:
    """Warps for a row of d elements."""
    return 4 if d <= _WIDE else 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] normalised over D, times the float32 weight [D]; in x's dtype."""
    d = x.shape[-1]
    assert weight.shape == (d,) and weight.dtype == torch.float32
    x = aligned(x)
    y = torch.empty_like(x)
    rms_norm_kernel[(x.numel() // d,)](
        x, weight, y, EPS=eps, D=d, BLOCK_D=triton.next_power_of_2(d), num_warps=warps(d), enable_fp_fusion=FP_FUSION
    )
    return y
