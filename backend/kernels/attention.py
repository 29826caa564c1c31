"""Causal attention over paged keys and values.

Why the fixed form depends on nothing but the query's own prefix. Keys lie in blocks of `BLOCK` positions anchored at
position 0, so a prefix is always cut at the same places. Every product is one bmm entry of constant inner shape, each
computed alone: scores are [rows, D] x [D, BLOCK], outputs are [rows, BLOCK] x [BLOCK, D]. A maximum is exact in any
order, a sum within a block has constant length, and the sums of blocks are added one by one in ascending order. A
block that is masked in full contributes exp(-inf) = 0 to both sums, exactly, so it does not matter how far the batch
is padded; and no rescaling happens, because the maximum over the whole prefix is known before the exponentials.

Rows are padded to a multiple of `ROW_MULTIPLE`, since a bmm of one row is another kernel with another order.

The fast form is stock scaled-dot-product attention over the batch padded to its longest member.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 64
ROW_MULTIPLE = 4
_GROUP_ELEMENTS = 1 << 21  # Scores held at once, in elements: keeps a pass inside the cache.


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the N rows of a pass stand: B sequences of up to `width` consecutive rows each.

    positions  [N] int64, position of each row in its sequence
    slots      [N] int64, where each row's key and value are written: block * BLOCK + offset
    tables     [B, blocks] int64, blocks that hold each sequence, padded with a block of zeros
    starts     [B] int64, position of each sequence's first row
    cells      [N] int64, place of each row in the padded [B * width] arrangement; None where N = B * width, in order
    """

    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    width: int
    cells: torch.Tensor | None = None

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ...] -> [B, width, ...], zeros in the empty cells."""
        shape = (self.tables.shape[0], self.width, *x.shape[1:])
        if self.cells is None:
            return x.view(shape)
        padded = x.new_zeros((shape[0] * shape[1], *x.shape[1:]))
        padded[self.cells] = x
        return padded.view(shape)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, width, ...] -> [N, ...]."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.cells is None else flat[self.cells]


def gather(pool: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """pool [blocks, kv_heads, BLOCK, D], tables [B, n] -> [B, kv_heads, n, BLOCK, D] in one copy."""
    # index_select copies whole rows; indexing with brackets goes element by element and takes three times as long.
    kv_heads = pool.shape[1]
    index = tables[:, None] * kv_heads + torch.arange(kv_heads, device=tables.device)[None, :, None]
    rows = pool.view(-1, pool.shape[2] * pool.shape[3]).index_select(0, index.flatten())
    return rows.view(*index.shape, *pool.shape[2:])


def attention_fast(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """q [N, heads, D] over pools [blocks, kv_heads, BLOCK, D] -> [N, heads * D]; bits depend on the batch."""
    # Empty cells of a short sequence that stands far on would reach behind the tables.
    length = min(int(layout.starts.max()) + layout.width, layout.tables.shape[1] * BLOCK)
    k = gather(keys, layout.tables).float().flatten(2, 3)[:, :, :length]
    v = gather(values, layout.tables).float().flatten(2, 3)[:, :, :length]
    query_positions = layout.starts[:, None] + torch.arange(layout.width)
    mask = torch.arange(length) <= query_positions[:, None, :, None]
    padded = layout.pad(q.float()).transpose(1, 2)
    out = F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, enable_gqa=True)
    return layout.unpad(out.transpose(1, 2)).flatten(1).to(q.dtype)


def attention_fixed(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """q [N, heads, D] over pools [blocks, kv_heads, BLOCK, D] -> [N, heads * D]; see above for the argument."""
    batch, blocks = layout.tables.shape
    heads, kv_heads, head_dim = q.shape[1], keys.shape[1], q.shape[2]
    rows = heads // kv_heads * layout.width
    padded_rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    # Rows of one kv head: (query head of the group, position).
    grouped = layout.pad(q.float() * head_dim**-0.5).view(batch, layout.width, kv_heads, -1, head_dim)
    grouped = grouped.permute(0, 2, 3, 1, 4)
    grouped = F.pad(grouped.reshape(batch, kv_heads, rows, head_dim), (0, 0, 0, padded_rows - rows))
    positions = (layout.starts[:, None] + torch.arange(layout.width)).repeat(1, heads // kv_heads)
    positions = F.pad(positions, (0, padded_rows - rows))

    group = max(1, _GROUP_ELEMENTS // (kv_heads * blocks * padded_rows * BLOCK))
    out = torch.cat(
        [
            _attend(grouped[i : i + group], positions[i : i + group], keys, values, layout.tables[i : i + group])
            for i in range(0, batch, group)
        ]
    )
    out = out[:, :, :rows].reshape(batch, kv_heads, -1, layout.width, head_dim).permute(0, 3, 1, 2, 4)
    return layout.unpad(out).flatten(1).to(q.dtype)


def _attend(
    q: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor
) -> torch.Tensor:
    """q [B, kv_heads, R, D] scaled, positions [B, R] -> float32 [B, kv_heads, R, D]."""
    batch, kv_heads, rows, head_dim = q.shape
    blocks = tables.shape[1]
    k = gather(keys, tables).float().view(-1, BLOCK, head_dim)
    v = gather(values, tables).float().view(-1, BLOCK, head_dim)
    repeated = q[:, :, None].expand(-1, -1, blocks, -1, -1).reshape(-1, rows, head_dim)
    scores = torch.bmm(repeated, k.transpose(1, 2)).view(batch, kv_heads, blocks, rows, BLOCK)
    key_positions = torch.arange(blocks * BLOCK).view(blocks, 1, BLOCK)
    scores.masked_fill_(key_positions > positions[:, None, None, :, None], float("-inf"))
    highest = scores.amax(dim=(2, 4), keepdim=True)
    weights = torch.exp(scores.sub_(highest))
    block_sums = weights.sum(-1)
    block_outputs = torch.bmm(weights.view(-1, rows, BLOCK), v).view(batch, kv_heads, blocks, rows, head_dim)
    total, out = block_sums[:, :, 0].clone(), block_outputs[:, :, 0].clone()
    for j in range(1, blocks):
        total += block_sums[:, :, j]
        out += block_outputs[:, :, j]
    return out / total[..., None]
