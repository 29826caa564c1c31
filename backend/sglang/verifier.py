"""Runs verification passes in SGLang's scheduler process, between its batches.

Owns the way from a `Span` to KV in SGLang's pool and tokens: which part of the sequence has verified KV already, which
slots the rest goes to, what enters the prefix tree. Keys and values replace what the fast path wrote, in the tree's own
slots, so that the next draft starts from them. What is missing, because it was never computed or was evicted, gets
slots of its own and enters the tree: replay is no case apart.

Refused drafts need no undoing. Their KV is right for the tokens that it was computed from, and the tree finds it by
these tokens alone.

Nothing is kept between passes but the tree and the bits of its slots, so all tensor-parallel ranks, which run the same
passes in the same order, stay alike.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from backend.kernels.adjust import Past
from backend.kernels.ops import Ops
from backend.kernels.sampling import Draw, choose, finite_rows, top_scores
from backend.protocol import VerifyShape
from backend.sglang.fixed_batch import Window, fixed_batch
from backend.sglang.passes import Choice, Done, PassReply, PassRequest, Span, share_groups
from backend.sglang.provenance import Provenance

NOT_FINITE = -1
"""Id of a choice whose logits were not finite."""


@dataclass(slots=True)
class _Placed:
    """A span in a pass: its rows [start, stop), the slots of its first `stop` tokens, `matched` of them the tree's."""

    span: Span
    start: int
    stop: int
    matched: int
    slots: torch.Tensor
    lock: Any

    @property
    def first_choice(self) -> int:
        return max(self.start, self.span.wanted)


class Verifier:
    """The fixed lane over one scheduler's weights, pool and prefix tree."""

    def __init__(self, scheduler: Any, ops: Ops, shape: VerifyShape):
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._runner = scheduler.tp_worker.model_runner
        self._ops = ops
        self._shape = shape
        self.provenance = Provenance(self._allocator.size + self._allocator.page_size, self._runner.device)

    def __repr__(self) -> str:
        return f"<Verifier {self._shape.groups}x{self._shape.window} {self.provenance!r}>"

    @torch.inference_mode()
    def run(self, request: PassRequest) -> PassReply:
        """Run one pass; what was done for each span, in order."""
        spans = request.spans
        placed = [self._match(span) for span in spans]
        try:
            self._share(placed)
            # Only now, with all prefixes locked, may the allocation evict.
            for item in placed:
                self._allocate(item)
            try:
                done = self._forward(placed)
            except BaseException:
                self._release(placed)
                raise
            self._keep(placed)
            return PassReply(done)
        finally:
            for item in placed:
                self._tree.unlock(item.lock)

    def _match(self, span: Span) -> _Placed:
        match = self._tree.match_prefix(MatchPrefixParams(key=_key(span.tokens)))
        matched = int(match.device_prefix_len)
        lock = self._tree.lock(match.last_device_node)
        slots = self._tree.path_device_indices(match.last_device_node)[:matched].to(torch.int64)
        start = min(self.provenance.fixed_prefix(slots), span.wanted)
        if span.redo is not None:
            start = min(start, span.redo)
        return _Placed(span, start, start, matched, slots, lock)

    def _share(self, placed: list[_Placed]) -> None:
        """Decide how far each span's rows go in this pass."""
        left = [len(item.span.tokens) - item.start for item in placed]
        shares = share_groups(left, self._shape.groups, self._shape.window)
        for item, rows, groups in zip(placed, left, shares, strict=True):
            item.stop = item.start + min(rows, groups * self._shape.window)

    def _allocate(self, item: _Placed) -> None:
        """Find slots for all tokens before `stop`; without memory for them the span has to wait."""
        missing = item.stop - item.matched
        if missing <= 0:
            item.slots = item.slots[: item.stop]
            return
        evict_from_tree_cache(self._tree, missing)
        fresh = self._allocator.alloc(missing)
        if fresh is None:
            item.stop = item.start
            return
        item.slots = torch.cat([item.slots, fresh.to(torch.int64)])

    def _forward(self, placed: list[_Placed]) -> list[Done]:
        windows: list[Window] = []
        rows: list[int] = []
        for item in placed:
            for start in range(item.start, item.stop, self._shape.window):
                stop = min(start + self._shape.window, item.stop)
                first_row = len(windows) * self._shape.window - start
                rows += range(first_row + max(start, item.span.wanted), first_row + stop)
                windows.append(Window(item.span.tokens[start:stop], start, item.slots[:stop]))
        if not windows:
            return [Done(item.start, item.stop, []) for item in placed]
        batch = fixed_batch(self._runner, self._ops, self._shape, windows, rows)
        logits = self._runner.forward(batch).logits_output.next_token_logits
        done = []
        for item in placed:
            count = max(0, item.stop - item.first_choice)
            choices, logits = _choose(self._ops, item, logits[:count]), logits[count:]
            done.append(Done(item.start, item.stop, choices))
        return done

    def _release(self, placed: list[_Placed]) -> None:
        """Give back what a pass that broke was given. What it wrote into the tree is what the next pass writes too."""
        for item in placed:
            if item.stop > item.matched:
                self._allocator.free(item.slots[item.matched :])

    def _keep(self, placed: list[_Placed]) -> None:
        """Enter what is new into the tree, and note what is verified. The tree frees what two spans computed twice."""
        for item in placed:
            if item.stop <= item.start:
                continue
            self.provenance.wrote_fixed(item.slots[item.start : item.stop])
            if item.stop > item.matched:
                key = _key(item.span.tokens[: item.stop])
                self._tree.insert(InsertParams(key=key, value=item.slots, prev_prefix_len=item.matched))


def _key(tokens: list[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


def _choose(ops: Ops, item: _Placed, logits: torch.Tensor) -> list[Choice]:
    """Choose and score a token for each row of `logits` [rows, vocab], which begin at the item's first choice."""
    span = item.span
    if len(logits) == 0:
        return []
    stop_ids = frozenset(span.stop_ids)
    draws = []
    for row in range(item.first_choice, item.stop):
        position = row + 1
        past = None
        if span.sampling.adjusts:
            past = Past(span.tokens[:position], span.generated + row - span.wanted, stop_ids)
        draws.append(Draw(span.sampling, position, past))
    finite = finite_rows(logits)
    if not bool(finite.all()):
        logits = logits.masked_fill(~finite[:, None], 0.0)
    ids = choose(logits, draws, ops.sample)
    scores = ops.logprobs(logits)
    chosen = scores.gather(1, ids[:, None])[:, 0]
    return [
        Choice(
            id=id_ if stands else NOT_FINITE,
            logprob=logprob,
            top=top_scores(row_scores, span.top),
            digest=hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest() if span.digests else "",
        )
        for stands, id_, logprob, row_scores, row in zip(
            finite.tolist(), ids.tolist(), chosen.tolist(), scores, logits, strict=True
        )
    ]
