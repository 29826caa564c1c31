"""Causal attention over paged keys and values.

Why the fixed form depends on nothing but the query's own prefix. Keys lie in blocks of `BLOCK` positions anchored at
position 0, so a prefix is always cut at the same places. Every product is one bmm entry of constant inner shape, each
computed alone: scores are [rows, D] x [D, BLOCK], outputs are [rows, BLOCK] x [BLOCK, D]. A maximum is exact in any
order, a sum within a block has constant length, and the sums of blocks are added one by one in ascending order. A
block that is masked in full contributes exp(-inf) = 0 to both sums, exactly, so it does not matter whether it is
computed; and no rescaling happens, because the maximum over the whole prefix is known before the exponentials.

Rows are padded to a multiple of `ROW_MULTIPLE`, since a bmm of one row is another kernel with another order.

The fast form is stock scaled-dot-product attention over sequences padded to the longest of them.

Both take a few sequences at a time, the fixed form a few rows of a long one: what is gathered and computed of them
stays in the cache, and no single tensor is so large that the C library maps it anew in every layer of every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 64
ROW_MULTIPLE = 4
_KEYS_HELD = 1 << 19  # Elements of keys gathered at once, and as many of values.
_SCORES_HELD = 1 << 18  # Elements of scores held at once,
_LEAST_ROWS = 16  # unless that were so few rows of a sequence.


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


def contained(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [N, kv_heads, D] as they are to be kept: where v is not finite it is 0, and k is not a number instead.

    A masked key counts for nothing, whatever it is, but a value that is not finite would spoil even rows that give it
    no weight: those before it, and those behind a refused draft. So it spoils the rows that see it and no others.
    """
    return k + (v - v), v.nan_to_num(0.0, 0.0, 0.0)


def attention_fast(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """q [N, heads, D] over pools [blocks, kv_heads, BLOCK, D] -> [N, heads * D]; bits depend on the batch."""
    padded = layout.pad(q.float()).transpose(1, 2)
    out = torch.empty_like(padded)
    for group in _groups(layout, keys.shape[1] * keys.shape[3]):
        tables = layout.tables[group.sequences, : group.blocks]
        k, v = (gather(pool, tables).float().flatten(2, 3) for pool in (keys, values))
        positions = layout.starts[group.sequences, None] + torch.arange(layout.width)
        for first in range(0, group.rows, BLOCK):
            rows = slice(first, min(first + BLOCK, group.rows))
            # Empty cells of a short sequence that stands far on would reach behind the tables.
            length = min(max(group.starts) + rows.stop, group.blocks * BLOCK)
            mask = torch.arange(length) <= positions[:, None, rows, None]
            out[group.sequences, :, rows] = F.scaled_dot_product_attention(
                padded[group.sequences, :, rows], k[:, :, :length], v[:, :, :length], attn_mask=mask, enable_gqa=True
            )
    return layout.unpad(out.transpose(1, 2)).flatten(1).to(q.dtype)


def attention_fixed(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """q [N, heads, D] over pools [blocks, kv_heads, BLOCK, D] -> [N, heads * D]; see above for the argument."""
    heads, kv_heads, head_dim = q.shape[1], keys.shape[1], q.shape[2]
    share = heads // kv_heads
    padded = layout.pad(q.float() * head_dim**-0.5).view(-1, layout.width, kv_heads, share, head_dim)
    # Rows of one kv head: (query head of its share, position).
    padded = padded.permute(0, 2, 3, 1, 4)
    out = torch.empty_like(padded)
    for group in _groups(layout, kv_heads * head_dim, kv_heads * share):
        tables = layout.tables[group.sequences, : group.blocks]
        # index_select copies whole blocks; indexing with brackets goes element by element.
        k, v = (
            pool.index_select(0, tables.flatten()).view(*tables.shape, *pool.shape[1:]).float()
            for pool in (keys, values)
        )
        positions = layout.starts[group.sequences, None] + torch.arange(layout.width)
        for first in range(0, group.rows, group.step):
            rows = slice(first, min(first + group.step, group.rows))
            blocks = min(group.blocks, (max(group.starts) + rows.stop - 1) // BLOCK + 1)
            clear = (min(group.starts) + first + 1) // BLOCK
            out[group.sequences, :, :, rows] = _attend(
                padded[group.sequences, :, :, rows], positions[:, rows], k[:, :blocks], v[:, :blocks], clear
            )
    return layout.unpad(out.permute(0, 3, 1, 2, 4).flatten(2, 3)).flatten(1).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive sequences that are attended to together: all their `rows` of a layout's width, `step` at a time.

    `starts` are their first rows' positions, `blocks` as many as the longest of them has.
    """

    sequences: slice
    starts: list[int]
    rows: int
    blocks: int
    step: int


def _groups(layout: Layout, key_size: int, heads: int = 0) -> Iterator[_Group]:
    """Cut a layout's sequences into groups, by the size of a key over all kv heads and by the scores of `heads`."""
    batch, most = layout.tables.shape
    starts = layout.starts.tolist()
    counts = [layout.width] * batch
    if layout.cells is not None:
        counts = torch.bincount(layout.cells // layout.width, minlength=batch).tolist()
    first = 0
    while first < batch:
        end, rows, blocks = first, 0, 0
        while end < batch:
            wider = max(rows, counts[end])
            longer = max(blocks, min(most, (starts[end] + counts[end] - 1) // BLOCK + 1))
            held = (end + 1 - first) * longer * BLOCK
            if end > first and (held * key_size > _KEYS_HELD or held * heads * wider > _SCORES_HELD):
                break
            end, rows, blocks = end + 1, wider, longer
        fits = _SCORES_HELD // max(1, blocks * BLOCK * heads)
        step = min(max(_LEAST_ROWS, fits), BLOCK) if end == first + 1 else max(rows, 1)
        yield _Group(slice(first, end), starts[first:end], rows, blocks, step)
        first = end


def _attend(q: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clear: int) -> torch.Tensor:
    """q [B, kv_heads, share, W, D] scaled, k and v [B, blocks, kv_heads, BLOCK, D] -> float32, of q's shape.

    Rows stand at `positions` [B, W]; all of them see the first `clear` blocks in full.
    """
    batch, blocks, kv_heads, _, head_dim = k.shape
    share = q.shape[2]
    rows = share * q.shape[3]
    padding = -rows % ROW_MULTIPLE
    flat = F.pad(q.reshape(batch, 1, kv_heads, rows, head_dim), (0, 0, 0, padding))
    repeated = flat.expand(-1, blocks, -1, -1, -1).reshape(-1, rows + padding, head_dim)
    scores = torch.bmm(repeated, k.reshape(-1, BLOCK, head_dim).transpose(1, 2))
    scores = scores.view(batch, blocks, kv_heads, rows + padding, BLOCK)
    if clear < blocks:
        last_keys = F.pad(positions.repeat(1, share), (0, padding))[:, None, None, :, None]
        key_positions = torch.arange(clear * BLOCK, blocks * BLOCK).view(-1, 1, 1, BLOCK)
        scores[:, clear:].masked_fill_(key_positions > last_keys, float("-inf"))
    weights = scores.sub_(scores.amax(dim=(1, 4), keepdim=True)).exp_()
    block_sums = weights.sum(-1)
    block_outputs = torch.bmm(weights.view(-1, rows + padding, BLOCK), v.reshape(-1, BLOCK, head_dim))
    block_outputs = block_outputs.view(batch, blocks, kv_heads, rows + padding, head_dim)
    total, out = block_sums[:, 0], block_outputs[:, 0]
    for block in range(1, blocks):
        total += block_sums[:, block]
        out += block_outputs[:, block]
    return (out / total[..., None])[:, :, :rows].view(q.shape)
