"""Runs passes: turns spans into tensors, calls the model with the lane's ops, chooses and scores tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend.engine.grammar_source import GRAMMAR_FIELD, GrammarError
from backend.engine.kv_pool import TRASH_BLOCK, ZERO_BLOCK, KvPool
from backend.engine.model import Model
from backend.engine.op_trace import OpTrace
from backend.engine.pass_graphs import PassGraphs
from backend.engine.prefix_cache import Lease
from backend.engine.scheduler import Lane, Pass, Span
from backend.engine.tasks import DecodeTask, Scored, Task, Unchosen
from backend.kernels.adjust import Past
from backend.kernels.attention import BLOCK, Layout
from backend.kernels.ops import Ops
from backend.kernels.platform import Capture
from backend.kernels.sampling import Draw, choose, finite_rows, top_scores
from backend.protocol import Sampling, VerifyShape

_SCORED_ROWS = {"cpu": 16, "cuda": 256}
"""Rows scored at a time, so that what is computed of them stays in a CPU's cache, or in bounds on a GPU."""
_IDLE = Draw(Sampling(temperature=0.0), 0)  # Stands in for a row that chooses nothing.
_NOT_FINITE = Unchosen("the model's logits for this context are not finite")


class Runner:
    """One model and one KV pool under two lanes, with passes recorded where the platform can `capture`."""

    def __init__(
        self, model: Model, kv: KvPool, fast: Ops, fixed: Ops, shape: VerifyShape, capture: Capture | None = None
    ):
        self._model = model
        self._kv = kv
        self._ops: dict[Lane, Ops] = {"fast": fast, "fixed": fixed}
        self._shape = shape
        self._graphs = None if capture is None else PassGraphs(model, kv, self._ops, shape, capture)

    def ops(self, lane: Lane) -> Ops:
        """A lane's arithmetic."""
        return self._ops[lane]

    def watched(self, lane: Lane, trace: OpTrace) -> Runner:
        """The same model and KV, with one lane's ops under a trace."""
        ops = self._ops | {lane: trace.watch(self._ops[lane])}
        return Runner(self._model, self._kv, ops["fast"], ops["fixed"], self._shape)

    def prepare(self, lease: Lease) -> None:
        """Clear a lease's fresh blocks and copy the part of a block it matched."""
        for block in lease.fresh:
            self._kv.clear(block)
        if lease.copy is not None:
            self._kv.copy(*lease.copy)

    def run(self, work: Pass) -> list[list[Scored | Unchosen]]:
        """Run one pass; the chosen tokens of each span, in order."""
        logits = self.forward(work)
        draws: list[Draw | Unchosen] = []
        tasks: list[Task] = []
        for span in work.spans:
            # The row at position p chooses the token at position p + 1.
            end = span.start + span.count + 1
            draws.extend(_draw(span.task, position) for position in range(end - span.choices, end))
            tasks += [span.task] * span.choices
        # Each row is scored by itself.
        scored: list[Scored | Unchosen] = []
        step = _SCORED_ROWS[self._model.device.type]
        for first in range(0, len(draws), step):
            rows = slice(first, first + step)
            scored += _score(self._ops[work.lane], logits[rows], draws[rows], tasks[rows])
        tokens = iter(scored)
        return [[next(tokens) for _ in range(span.choices)] for span in work.spans]

    @torch.inference_mode()
    def forward(self, work: Pass) -> torch.Tensor:
        """Run one pass; float32 logits [sum of the spans' choices, vocab], in order."""
        for block in work.fresh:
            self._kv.clear(block)
        ops = self._ops[work.lane]
        graphs, full_shape = self._graphs, None
        if work.lane == "fixed" and not ops.shape_invariant:
            full_shape = self._shape
        elif graphs is not None:
            full_shape = graphs.shape_for(work.lane, [span.count for span in work.spans])
        token_ids, layout = _arrange(work.spans, full_shape, self._model.device)
        logit_rows: list[int] = []
        rows = 0
        for span in work.spans:
            rows += span.count
            logit_rows.extend(range(rows - span.choices, rows))
        if graphs is not None and full_shape is not None:
            hidden = graphs.hidden(work.lane, full_shape, token_ids, layout)
        else:
            hidden = self._model.hidden(ops, token_ids, layout, self._kv)
        return self._model.logits(ops, hidden[torch.tensor(logit_rows, dtype=torch.int64, device=hidden.device)])


def _draw(task: Task, position: int) -> Draw | Unchosen:
    """How the token at a position is to be chosen: with a past of its own, drafts included, where it needs one."""
    if not task.sampling.adjusts:
        return Draw(task.sampling, position)
    generated = position - (len(task.context) - task.generated)
    allowed: bytes | None = None
    if task.sampling.grammar is not None:
        assert task.constraint is not None
        try:
            allowed = task.constraint.allowed(task.tokens[position - generated : position])
        except GrammarError as error:
            return Unchosen(f"{GRAMMAR_FIELD}: {error}", GRAMMAR_FIELD)
    return Draw(task.sampling, position, Past(task.tokens[:position], generated, task.stop_ids, allowed))


def _arrange(
    spans: Sequence[Span], full_shape: VerifyShape | None, device: torch.device
) -> tuple[torch.Tensor, Layout]:
    """Rows of the spans, then dummies up to `full_shape` where one is given."""
    width = full_shape.window if full_shape else max(span.count for span in spans)
    batch = full_shape.groups if full_shape else len(spans)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cells: list[int] = []
    starts = [0] * batch
    tables: list[list[int]] = [[] for _ in range(batch)]
    for index, span in enumerate(spans):
        lease = span.task.lease
        assert lease is not None
        stop = span.start + span.count
        ids += span.task.tokens[span.start : stop]
        positions += range(span.start, stop)
        cells += range(index * width, index * width + span.count)
        starts[index] = span.start
        tables[index] = lease.blocks[: -(-stop // BLOCK)]
        # The fast lane leaves cached KV alone: others may be reading it, and it may be the fixed lane's.
        keep = 0 if span.task.in_fixed_lane else lease.cached
        slots += [
            TRASH_BLOCK * BLOCK if position < keep else lease.blocks[position // BLOCK] * BLOCK + position % BLOCK
            for position in range(span.start, stop)
        ]
    if full_shape:
        used = set(cells)
        for cell in range(batch * width):
            if cell not in used:
                ids.append(0)
                positions.append(0)
                slots.append(TRASH_BLOCK * BLOCK)
                cells.append(cell)
    longest = max(1, *(len(table) for table in tables))
    table = [blocks + [ZERO_BLOCK] * (longest - len(blocks)) for blocks in tables]
    return torch.tensor(ids, device=device), Layout(
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        tables=torch.tensor(table, device=device),
        starts=torch.tensor(starts, device=device),
        width=width,
        cells=None if cells == list(range(batch * width)) else torch.tensor(cells, device=device),
    )


@torch.inference_mode()
def _score(
    ops: Ops, logits: torch.Tensor, draws: Sequence[Draw | Unchosen], tasks: Sequence[Task]
) -> list[Scored | Unchosen]:
    """Choose and score one token for each row of logits [N, vocab], where it is finite and its draw says how."""
    finite = finite_rows(logits)
    if not bool(finite.all()):
        logits = logits.masked_fill(~finite[:, None], 0.0)
    ids = choose(logits, [_IDLE if isinstance(draw, Unchosen) else draw for draw in draws], ops.sample)
    log_probabilities = ops.logprobs(logits)
    chosen = log_probabilities.gather(1, ids[:, None])[:, 0].tolist()
    margins = _margins(logits).tolist() if any(_is_draft(task) for task in tasks) else [0.0] * len(tasks)
    tops = [(log_probabilities if task.top_as_logprobs else logits)[row] for row, task in enumerate(tasks)]
    return [
        draw
        if isinstance(draw, Unchosen)
        else Scored(token, logprob, margin if _is_draft(task) else 0.0, top_scores(top, task.top))
        if stands
        else _NOT_FINITE
        for draw, stands, token, logprob, margin, top, task in zip(
            draws, finite.tolist(), ids.tolist(), chosen, margins, tops, tasks, strict=True
        )
    ]


def _margins(logits: torch.Tensor) -> torch.Tensor:
    """logits [N, vocab] -> the highest minus the second highest [N]."""
    best = torch.topk(logits, 2).values
    return best[:, 0] - best[:, 1]


def _is_draft(task: Task) -> bool:
    return isinstance(task, DecodeTask) and task.is_draft
