"""Linear layers: y = x W^T + b over plain weights.

Why a row's result depends on that row alone. One program computes a BLOCK_M x BLOCK_N tile of y: it walks over K in
steps of BLOCK_K from 0 up and adds each step's product to float32 accumulators. Tiles are the same for every number of
rows, so a row always meets the same instructions in the same order; where the last tile has fewer rows, the others are
zeros. The bias is added and the sum rounded once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from backend.kernels.dense import DenseWeight
from backend.kernels.triton_ops.launch import FP_FUSION, aligned, dot


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows, columns and steps of a tile, and the warps and pipeline stages that compute it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


TILES = {
    torch.bfloat16: Tiles(m=64, n=128, k=64, warps=4, stages=3),
    torch.float16: Tiles(m=64, n=128, k=64, warps=4, stages=3),
    # No tensor cores: all products in plain float32, whose operands take many registers.
    torch.float32: Tiles(m=32, n=64, k=32, warps=4, stages=2),
}


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Tiles of rows come first in the grid: neighbours share their part of the weight in the cache.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + m[:, None].to(tl.int64) * K + k[None, :]
    weight_tile = weight + n[None, :].to(tl.int64) * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x_mask = m[:, None] < rows
        weight_mask = n[None, :] < N
        if K % BLOCK_K != 0:
            x_mask = x_mask & (start + k[None, :] < K)
            weight_mask = weight_mask & (start + k[:, None] < K)
        a = tl.load(x_tile + start, mask=x_mask, other=0.0)
        b = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        total = dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_tile = y + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_tile, total.to(y.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < N))


def linear(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    """x [M, K] -> [M, N] in the weight's `out_dtype`; the bits of a row depend on that row alone."""
    n, k = weight.matrix.shape
    assert x.dim() == 2 and x.shape[1] == k and x.dtype == weight.matrix.dtype
    x = aligned(x)
    tiles = TILES[x.dtype]
    y = torch.empty(len(x), n, dtype=weight.out_dtype, device=x.device)
    linear_kernel[(triton.cdiv(len(x), tiles.m), triton.cdiv(n, tiles.n))](
        x,
        weight.matrix,
        weight.matrix if weight.bias is None else weight.bias,
        y,
        len(x),
        N=n,
        K=k,
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_K=tiles.k,
        num_warps=tiles.warps,
        enable_fp_fusion=FP_FUSION,
        num_stages=tiles.stages,
    )
    return y
