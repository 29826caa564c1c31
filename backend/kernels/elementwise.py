"""RMSNorm, rotary embedding and SwiGLU: ops that work on one row at a time.

Why the fixed forms depend on nothing but their row. Each element is a fixed expression of its own row, and the one
reduction, RMSNorm's mean over the hidden size, runs over a contiguous row of constant length in a fixed order. What
has to be avoided is PyTorch's vectorised loops whose scalar tail rounds differently from their SIMD body, which makes
an element's bits depend on its place in memory: silu, sigmoid, gelu and exp2 do that; add, mul, div, exp and float32
rsqrt do not. So SiLU is spelled a / (1 + exp(-a)), and all of it runs in float32 with one rounding at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] normalised over D, times the float32 weight [D]; in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [N, heads, D] by the angles cos, sin [N, 1, D] (rotate-half layout); in x's dtype."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    return (wide * cos + rotated * sin).to(x.dtype)


def swiglu_fast(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [M, 2 I] -> [M, I]; bits may depend on the place in memory."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_fixed(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [M, 2 I] -> [M, I], in gate_up's dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
