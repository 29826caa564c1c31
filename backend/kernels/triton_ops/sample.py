"""Choosing a token by Gumbel-max: the best of logit + noise, the noise a hash as in backend/kernels/sampling.py.

Why a row's result depends on that row alone. One program walks over one row from token 0 up; the noise of a token is a
function of (seed, position, token id), computed with integers bit for bit as the reference does and turned into a
Gumbel variate by fixed float32 expressions. A maximum is exact in any order, and among equals the lowest id wins.

The logarithms are this device's own, so a token's noise may differ from a CPU's in the last bits. -log(1 - u) near 0,
where the winners are, is summed as a series: the GPU's approximate logarithm is accurate in absolute terms only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from backend.kernels.sampling import noise_keys
from backend.kernels.triton_ops.launch import FP_FUSION, aligned

BLOCK = 1024
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mix32(x: tl.tensor) -> tl.tensor:
    """The hash's finaliser on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(token: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of int32 token ids under a key of two int32 halves."""
    bits = mix32(mix32(token.to(tl.uint32) ^ low.to(tl.uint32)) ^ high.to(tl.uint32))
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    uniform = tl.minimum(uniform, 0.999999940395355224609375)  # 1 - 2 ** -24
    # -log(1 - u) = u + u^2 / 2 + u^3 / 3 + ...; seven terms reach float32's precision for u up to 1/16.
    series = 1 / 6 + uniform * (1 / 7)
    series = 1 / 4 + uniform * (1 / 5 + uniform * series)
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * series)))
    exponential = tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def sample_kernel(
    logits: tl.tensor,
    low_keys: tl.tensor,
    high_keys: tl.tensor,
    chosen: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(low_keys + row), tl.load(high_keys + row)
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_id = tl.full((BLOCK,), _NO_ID, dtype=tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + i
        logit = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
        score = logit + gumbel(token, low, high)
        # Strictly better only: of equal scores the earlier token stays.
        best_id = tl.where(score > best, token, best_id)
        best = tl.maximum(best, score)
    winner = tl.min(tl.where(best == tl.max(best, axis=0), best_id, _NO_ID), axis=0)
    tl.store(chosen + row, winner.to(tl.int64))


def sample(logits: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Choose by the noise of keys[i] = (seed, position) for row i of float32 logits [N, vocab] -> int64 [N].

    Logits may be -inf, but not all of a row's.
    """
    assert logits.dim() == 2 and logits.dtype == torch.float32 and len(logits) == len(keys)
    logits = aligned(logits)
    low, high = (half.to(logits.device) for half in noise_keys(keys))
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    sample_kernel[(len(logits),)](
        logits, low, high, chosen, VOCAB=logits.shape[1], BLOCK=BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION
    )
    return chosen
