"""The fixed lane inside SGLang's own forward: a batch of its own type, and what attention and logits do with it.

A verification pass runs through SGLang's model runner like any extend batch, always with exactly G x W rows, so that
every product has the same shape whatever is verified. Two layers look at the type of the batch: attention goes through
our kernel over keys gathered from the pool, whatever attention backend SGLang was started with; and the head turns just
the wanted rows into logits, `window` at a time, so that this product has one shape too.

Why a row's bits depend on its prefix alone then: norms, activations and rotary embedding work row by row; products of
one shape give a row the same bits wherever it stands and whatever the others hold; attention does so by its own
argument (backend/kernels/attention.py). In doubt are the products and activations, which are the library's. The
start-up probe checks them on the machine at hand.

Several groups may hold consecutive windows of one sequence: each layer writes all keys and values before it attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from backend.kernels.attention import BLOCK, Layout, attention_fixed, contained
from backend.kernels.ops import Ops
from backend.protocol import VerifyShape

_SCRATCH_SLOT = 0
"""SGLang keeps slot 0 of its pools for the writes of padding rows."""


@dataclass(frozen=True, slots=True)
class Window:
    """One group of a pass: rows [start, start + len(ids)) of a sequence whose KV lies in `slots` [start + len(ids)]."""

    ids: list[int]
    start: int
    slots: torch.Tensor


@dataclass
class FixedBatch(ForwardBatch):  # type: ignore[misc]
    """An extend batch that is a verification pass.

    `layout` is that of `attention` over a pool gathered from the slots `gathered` [blocks, BLOCK], of which those
    outside `valid` hold nothing. `pool` is SGLang's. `logit_rows` [wanted] are the rows whose logits are asked for.
    """

    layout: Layout | None = None
    gathered: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    pool: Any = None
    logit_rows: torch.Tensor | None = None
    window: int = 0
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor] = attention_fixed


def fixed_batch(runner: Any, ops: Ops, shape: VerifyShape, windows: list[Window], logit_rows: list[int]) -> FixedBatch:
    """Arrange up to G windows, filled with dummies to G x W rows. `logit_rows` count rows of the whole pass."""
    groups, width = shape.groups, shape.window
    device = runner.device
    ids = torch.zeros(groups, width, dtype=torch.int64)
    positions = torch.zeros(groups, width, dtype=torch.int64)
    slots = torch.full((groups, width), _SCRATCH_SLOT, dtype=torch.int64, device=device)
    starts = torch.zeros(groups, dtype=torch.int64)
    blocks = max(-(-len(window.slots) // BLOCK) for window in windows)
    gathered = torch.full((groups, blocks * BLOCK), _SCRATCH_SLOT, dtype=torch.int64, device=device)
    valid = torch.zeros(groups, blocks * BLOCK, dtype=torch.bool)
    for group, window in enumerate(windows):
        count, stop = len(window.ids), len(window.slots)
        ids[group, :count] = torch.tensor(window.ids)
        positions[group, :count] = torch.arange(window.start, stop)
        slots[group, :count] = window.slots[window.start :]
        starts[group] = window.start
        gathered[group, :stop] = window.slots
        valid[group, :stop] = True
    rows = groups * width
    ends = starts + width
    batch = FixedBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=groups,
        input_ids=ids.flatten().to(device),
        req_pool_indices=torch.zeros(groups, dtype=torch.int64, device=device),
        seq_lens=ends.to(device),
        out_cache_loc=slots.flatten(),
        seq_lens_sum=int(ends.sum()),
        seq_lens_cpu=ends,
        orig_seq_lens=ends.to(device),
        positions=positions.flatten().to(device),
        extend_num_tokens=rows,
        extend_seq_lens=torch.full((groups,), width, dtype=torch.int32, device=device),
        extend_prefix_lens=starts.to(torch.int32).to(device),
        extend_start_loc=torch.arange(0, rows, width, dtype=torch.int32, device=device),
        extend_prefix_lens_cpu=starts.tolist(),
        extend_seq_lens_cpu=[width] * groups,
        extend_logprob_start_lens_cpu=[0] * groups,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=runner.spec_algorithm,
        top_logprobs_nums=[0] * groups,
        token_ids_logprobs=[None] * groups,
        layout=Layout(
            positions=positions.flatten().to(device),
            slots=slots.flatten(),
            tables=torch.arange(groups * blocks, device=device).view(groups, blocks),
            starts=starts.to(device),
            width=width,
            cells=None,
        ),
        gathered=gathered.flatten(),
        valid=valid.flatten().to(device),
        pool=runner.token_to_kv_pool,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        window=width,
        attention=ops.attention,
    )
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    # The attention backend has nothing to plan: it never sees the batch.
    batch.mark_forward_metadata_ready()
    return batch


def attend(
    stock: Callable[..., Any], layer: Any, q: Any, k: Any, v: Any, batch: Any, *rest: Any, **options: Any
) -> Any:
    """Around RadixAttention.forward: q [rows, heads * D] -> [rows, heads * D] in the fixed lane for its own batches."""
    if not isinstance(batch, FixedBatch):
        return stock(layer, q, k, v, batch, *rest, **options)
    assert batch.layout is not None and batch.gathered is not None and batch.valid is not None
    heads, kv_heads, head_dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
    k, v = contained(k.view(-1, kv_heads, head_dim), v.view(-1, kv_heads, head_dim))
    batch.pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys, values = (_gather(buffer, batch.gathered, batch.valid) for buffer in batch.pool.get_kv_buffer(layer.layer_id))
    return batch.attention(q.reshape(-1, heads, head_dim), keys, values, batch.layout)


def _gather(buffer: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """buffer [pool, kv_heads, D] at slots [blocks * BLOCK] -> [blocks, kv_heads, BLOCK, D], zeros where not valid.

    A masked key counts for nothing, but a NaN left in its slot would not.
    """
    rows = buffer.index_select(0, slots).masked_fill_(~valid[:, None, None], 0)
    return rows.view(-1, BLOCK, *rows.shape[1:]).transpose(1, 2).contiguous()


def to_logits(
    stock: Callable[..., Any],
    processor: Any,
    input_ids: Any,
    hidden: Any,
    head: Any,
    batch: Any,
    *rest: Any,
    **options: Any,
) -> Any:
    """Around LogitsProcessor.forward: float32 logits [wanted, vocab] of a fixed batch's wanted rows."""
    if not isinstance(batch, FixedBatch):
        return stock(processor, input_ids, hidden, head, batch, *rest, **options)
    assert batch.logit_rows is not None
    metadata = LogitsMetadata.from_forward_batch(batch)
    wanted = hidden[batch.logit_rows]
    parts = []
    for rows in wanted.split(batch.window):
        full = F.pad(rows, (0, 0, 0, batch.window - len(rows)))
        parts.append(processor._get_logits(full, head, metadata)[: len(rows)].float())
    logits = torch.cat(parts) if parts else hidden.new_zeros((0, 0), dtype=torch.float32)
    return LogitsProcessorOutput(next_token_logits=logits)
