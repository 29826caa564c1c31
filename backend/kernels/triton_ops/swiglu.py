"""SwiGLU: silu(gate) * up.

Why a row's result depends on that row alone. Each element is one fixed expression of two elements of its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.kernels.triton_ops.launch import FP_FUSION, aligned

BLOCK = 1024


@triton.jit
def swiglu_kernel(gate_up: tl.tensor, y: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    gated = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + row * WIDTH + i, gated.to(y.dtype.element_ty), mask=i < WIDTH)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [M, 2 I] -> [M, I], in gate_up's dtype."""
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    gate_up = aligned(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_up, y, WIDTH=width, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION
    )
    return y
