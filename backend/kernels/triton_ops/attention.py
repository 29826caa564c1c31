"""Causal attention over paged keys and values, with an online softmax (Milakov, Gimelshein 2018; FlashAttention-2).

Why a row's result depends on nothing but its own prefix. One program holds BLOCK_M rows of one sequence and one head of
keys, and walks over the sequence's blocks of 64 positions from position 0 up, so every prefix is cut at the same
places and summed in the same order by one program. Behind a row's own position a block changes nothing: its scores are
-inf, so the maximum stays, the old sums are multiplied by exp(0) = 1 and exact zeros are added. So neither the other
rows of the tile, nor how far the longest of them goes, nor how far the table is padded, shows in the bits.

Rows of a tile are (position, query head of the group): all query heads that share a head of keys read it once. Weights
are rounded to the values' dtype before they meet the values, as FlashAttention does; sums stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from backend.kernels.attention import BLOCK, Layout
from backend.kernels.triton_ops.launch import FP_FUSION, aligned, dot


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a tile, and the warps and pipeline stages that compute it."""

    m: int
    warps: int
    stages: int


TILES = {
    torch.bfloat16: Tiles(m=64, warps=8, stages=2),
    torch.float16: Tiles(m=64, warps=8, stages=2),
    torch.float32: Tiles(m=16, warps=8, stages=1),
}
_LEAST_DOT = 16
"""The shortest side of a matrix product that Triton compiles."""


@triton.jit(do_not_specialize=["width", "blocks"])
def attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    sequence, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(starts + sequence).to(tl.int32)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d, place = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    offset, head = m // GROUP, kv_head * GROUP + m % GROUP
    positions = start + offset
    cell = ((sequence * width + offset) * (KV_HEADS * GROUP) + head)[:, None] * D + d[None, :]
    mask = (offset < width)[:, None] & (d < D)[None, :]
    query = tl.load(q + cell, mask=mask, other=0.0)

    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    # Up to the block of the tile's last row; rows that only pad the batch may stand behind the table's end.
    last = start + tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP, width - 1)
    for j in range(0, tl.minimum(last // BLOCK + 1, blocks)):
        block = tl.load(tables + sequence * blocks + j).to(tl.int64)
        first = (block * KV_HEADS + kv_head) * BLOCK * D
        key = tl.load(keys + first + place[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
        value = tl.load(values + first + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        scores = dot(query, key, tl.zeros((BLOCK_M, BLOCK), dtype=tl.float32)) * SCALE
        scores = tl.where(j * BLOCK + place[None, :] <= positions[:, None], scores, float("-inf"))
        # Finite from the first block on: position 0 is in every row's prefix.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_highest[:, None])
        shrink = tl.exp(highest - new_highest)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        total = dot(weights.to(value.dtype), value, total * shrink[:, None])
        highest = new_highest
    tl.store(out + cell, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=mask)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """q [N, heads, D] over pools [blocks, kv_heads, BLOCK, D] -> [N, heads * D], all in one dtype."""
    heads, d, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
    assert keys.shape == values.shape and keys.shape[2:] == (BLOCK, d) and heads % kv_heads == 0
    assert q.dtype == keys.dtype == values.dtype and keys.is_contiguous() and values.is_contiguous()
    assert layout.tables.is_contiguous() and layout.starts.is_contiguous()
    padded = aligned(layout.pad(q))
    out = torch.empty_like(padded)
    tiles = TILES[q.dtype]
    sequences, blocks = layout.tables.shape
    grid = (triton.cdiv(layout.width * heads // kv_heads, tiles.m), sequences, kv_heads)
    attention_kernel[grid](
        padded,
        keys,
        values,
        layout.tables,
        layout.starts,
        out,
        layout.width,
        blocks,
        SCALE=d**-0.5,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=d,
        BLOCK=BLOCK,
        BLOCK_M=tiles.m,
        BLOCK_D=max(_LEAST_DOT, triton.next_power_of_2(d)),
        num_warps=tiles.warps,
        enable_fp_fusion=FP_FUSION,
        num_stages=tiles.stages,
    )
    return layout.unpad(out).flatten(1)
