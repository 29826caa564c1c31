"""The memory of keys and values: a pool of blocks for each layer. Which block holds what is prefix_cache's business."""

from __future__ import annotations

import math

import numpy as np
import torch

from backend.engine.checkpoint import ModelConfig
from backend.kernels.attention import BLOCK, contained

ZERO_BLOCK = 0
"""Pads block tables. Always zeros: a value that is not finite would spoil even a row that gives it no weight."""
TRASH_BLOCK = 1
"""Takes the keys and values nobody wants. In no block table."""
RESERVED_BLOCKS = 2
_CPU = torch.device("cpu")


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return 2 * config.layers * config.kv_heads * BLOCK * config.head_dim * dtype.itemsize


class KvPool:
    """Keys and values [blocks, kv_heads, BLOCK, head_dim] for each layer, in the numerics' dtype, on one device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, blocks: int, device: torch.device = _CPU):
        shape = (blocks + RESERVED_BLOCKS, config.kv_heads, BLOCK, config.head_dim)
        self.blocks = blocks
        keys, values = _zeros((2, config.layers, *shape), dtype, device)
        self.keys, self.values = list(keys), list(values)
        self._heads = torch.arange(config.kv_heads, device=device)

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """slots [N] -> the rows [N * kv_heads] of a pool seen as [-1, head_dim], for `write`."""
        block, offset = slots // BLOCK, slots % BLOCK
        return ((block[:, None] * len(self._heads) + self._heads) * BLOCK + offset[:, None]).flatten()

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [N, kv_heads, head_dim] at `rows`."""
        head_dim = k.shape[-1]
        k, v = contained(k, v)
        self.keys[layer].view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim))
        self.values[layer].view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim))

    @torch.inference_mode()
    def clear(self, block: int) -> None:
        """Zero a block, so that nothing its last owner left can reach the next."""
        for pool in (*self.keys, *self.values):
            pool[block].zero_()

    @torch.inference_mode()
    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the keys and values of a block's first `positions` positions."""
        for pool in (*self.keys, *self.values):
            pool[target, :, :positions].copy_(pool[source, :, :positions])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; a CPU's take memory only once they are written to, while those of torch.zeros do at once.

    That holds for what the C library maps on its own, as it does whatever is larger than 32 MiB. Smaller parts would
    come out of memory that it keeps, and be zeroed: hence one piece for all layers.
    """
    if device != _CPU:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
