"""Passes of constant shape, recorded once and replayed: launching hundreds of small kernels costs more than they do.

Owns the tensors that a recorded pass reads, and the choice of a recorded shape for a pass. A pass with fewer rows is
filled with dummies, which no row's bits depend on; its logits are computed outside, for the rows that ask for them.
Recording itself is the platform's `capture`; one that just computes again does for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from backend.engine.kv_pool import TRASH_BLOCK, ZERO_BLOCK, KvPool
from backend.engine.model import Model
from backend.engine.scheduler import Lane
from backend.kernels.attention import BLOCK, Layout
from backend.kernels.ops import Ops
from backend.kernels.platform import Capture, Compute
from backend.protocol import VerifyShape

_DECODING = (1, 2, 4, 8, 16, 32, 64)
_MOST_FILLING = 2
"""A recorded pass may have this many times the rows of the pass it is used for."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A pass: what it reads, and how it is run again."""

    token_ids: torch.Tensor
    layout: Layout
    replay: Compute


class PassGraphs:
    """Passes of one model over one KV pool: decoding in both lanes, and full windows in the fixed one."""

    @torch.inference_mode()
    def __init__(self, model: Model, kv: KvPool, lanes: Mapping[Lane, Ops], window: VerifyShape, capture: Capture):
        blocks = min(kv.blocks, -(-model.config.max_position // BLOCK))
        self._recorded: dict[tuple[Lane, VerifyShape], _Recorded] = {}
        # The largest first: the others find room in its memory.
        for lane, ops in lanes.items():
            shapes = [VerifyShape(count, 1) for count in reversed(_DECODING)]
            if lane == "fixed":
                shapes.insert(0, window)
            for shape in shapes:
                self._recorded[lane, shape] = _record(model, kv, ops, shape, blocks, capture)

    def shape_for(self, lane: Lane, counts: Sequence[int]) -> VerifyShape | None:
        """The smallest recorded shape that holds sequences of these numbers of rows, if it is not much larger."""
        sequences, rows_each, most = len(counts), max(counts), _MOST_FILLING * sum(counts)
        fitting = [
            shape
            for recorded_lane, shape in self._recorded
            if recorded_lane == lane
            and shape.groups >= sequences
            and shape.window >= rows_each
            and shape.groups * shape.window <= most
        ]
        return min(fitting, key=lambda shape: shape.groups * shape.window, default=None)

    def hidden(self, lane: Lane, shape: VerifyShape, token_ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        """What Model.hidden gives for a full pass of a recorded shape, until the next call."""
        recorded = self._recorded[lane, shape]
        recorded.token_ids.copy_(token_ids)
        mine = recorded.layout
        mine.positions.copy_(layout.positions)
        mine.slots.copy_(layout.slots)
        mine.starts.copy_(layout.starts)
        # Behind a sequence's own blocks there have to be zeros, not what the last pass left.
        mine.tables.fill_(ZERO_BLOCK)
        mine.tables[:, : layout.tables.shape[1]].copy_(layout.tables)
        assert mine.cells is not None
        if layout.cells is None:
            torch.arange(len(token_ids), out=mine.cells)
        else:
            mine.cells.copy_(layout.cells)
        return recorded.replay()


def _record(model: Model, kv: KvPool, ops: Ops, shape: VerifyShape, blocks: int, capture: Capture) -> _Recorded:
    """Record a pass of dummies."""
    rows = shape.groups * shape.window

    def integers(*size: int, value: int = 0) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.int64, device=model.device)

    token_ids = integers(rows)
    layout = Layout(
        positions=integers(rows),
        slots=integers(rows, value=TRASH_BLOCK * BLOCK),
        tables=integers(shape.groups, blocks, value=ZERO_BLOCK),
        starts=integers(shape.groups),
        width=shape.window,
        cells=torch.arange(rows, device=model.device),
    )
    return _Recorded(token_ids, layout, capture(lambda: model.hidden(ops, token_ids, layout, kv)))
