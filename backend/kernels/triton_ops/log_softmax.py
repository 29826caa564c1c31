"""Log-softmax over the vocabulary.

Why a row's result depends on that row alone. One program walks over one row in tiles of BLOCK from token 0 up. The
maximum is exact in any order; each of BLOCK running sums adds its own column's terms in order, and one tree of
constant shape adds the running sums. PyTorch's own kernel begins a row at the next aligned address, so with an odd
vocabulary its sums depend on where in memory the row lies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.kernels.triton_ops.launch import FP_FUSION, aligned

BLOCK = 4096


@triton.jit
def log_softmax_kernel(logits: tl.tensor, out: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * VOCAB
    i = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        tile = tl.load(logits + row + start + i, mask=start + i < VOCAB, other=float("-inf"))
        highest = tl.maximum(highest, tile)
    top = tl.max(highest, axis=0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        tile = tl.load(logits + row + start + i, mask=start + i < VOCAB, other=float("-inf"))
        sums += tl.exp(tile - top)
    normaliser = tl.log(tl.sum(sums, axis=0))
    for start in range(0, VOCAB, BLOCK):
        tile = tl.load(logits + row + start + i, mask=start + i < VOCAB, other=float("-inf"))
        tl.store(out + row + start + i, tile - top - normaliser, mask=start + i < VOCAB)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Finite float32 logits [N, vocab] -> natural-log probabilities [N, vocab]."""
    assert logits.dim() == 2 and logits.dtype == torch.float32
    logits = aligned(logits)
    out = torch.empty_like(logits)
    log_softmax_kernel[(len(logits),)](
        logits, out, VOCAB=logits.shape[1], BLOCK=BLOCK, num_warps=8, enable_fp_fusion=FP_FUSION
    )
    return out
