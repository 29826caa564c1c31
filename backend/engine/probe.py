"""The start-up probe: does the fixed lane hold its invariants on these weights, on this machine?

Runs one short sequence alone, then again in other slots, companies, windows and paddings, and compares logits bitwise.
Keys and values are compared through the logits of the rows that attend to them. It takes seconds and catches what
differs from machine to machine (a library's choice of kernel, say); the tests go much further.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from backend.engine.checkpoint import ModelConfig
from backend.engine.kv_pool import RESERVED_BLOCKS
from backend.engine.prefix_cache import Lease
from backend.engine.runner import Runner
from backend.engine.scheduler import Pass, Span
from backend.engine.tasks import VerifyTask
from backend.kernels.attention import BLOCK
from backend.kernels.sampling import Draw, choose, logprobs
from backend.protocol import Sampling, VerifyShape

_LENGTH = 2 * BLOCK + 9
_CHECKED = 6  # The last rows, whose logits are compared.
_BLOCKS_EACH = -(-_LENGTH // BLOCK) + 1
_SEQUENCES = 4
PROBE_BLOCKS = _BLOCKS_EACH * _SEQUENCES
"""Blocks of KV that the probe needs."""


class InvarianceError(Exception):
    """The fixed lane's bits depend on something they must not depend on; the message names it."""


def probe(runner: Runner, config: ModelConfig, shape: VerifyShape) -> str:
    """Check the fixed lane over `runner`'s own KV; a digest of the reference's logits. Raises InvarianceError."""
    length = min(_LENGTH, config.max_position)
    # Python's own generator: its sequence is fixed for all versions and platforms.
    rng = random.Random(0)
    tokens = [[rng.randrange(config.vocab_size) for _ in range(length)] for _ in range(_SEQUENCES)]
    tasks = [_task(ids, index) for index, ids in enumerate(tokens)]
    head = length - _CHECKED

    def rows(index: int, start: int, stop: int) -> Span:
        return Span(tasks[index], start, stop - start, min(stop - start, _CHECKED))

    def fill(index: int, bounds: Sequence[int]) -> torch.Tensor:
        spans = [rows(index, start, stop) for start, stop in pairwise(bounds)]
        return [runner.forward(Pass("fixed", [span])) for span in spans][-1]

    step = shape.window
    reference = fill(0, [*range(0, head, step), head, length])
    uneven = [0]
    while uneven[-1] < head:
        uneven.append(min(head, uneven[-1] + rng.randint(1, step)))
    _expect(torch.equal(fill(0, [*uneven, length]), reference), "offset, history")
    one_by_one = torch.cat([runner.forward(Pass("fixed", [rows(0, at, at + 1)])) for at in range(head, length)])
    _expect(torch.equal(one_by_one, reference), "offset")

    for index in range(1, _SEQUENCES):
        fill(index, [*range(0, head, step), head, length])
    for slot in range(min(_SEQUENCES, shape.groups)):
        # Companions of other lengths, in front of the sequence and behind it.
        spans = [rows(index, rng.randrange(max(0, head - step), head), head) for index in range(1, _SEQUENCES)]
        spans.insert(slot, rows(0, head, length))
        spans = spans[: shape.groups]
        before = sum(span.choices for span in spans[:slot])
        logits = runner.forward(Pass("fixed", spans))[before : before + _CHECKED]
        _expect(torch.equal(logits, reference), "slot, company, padding")

    draws = [Draw(Sampling(temperature=1.0, seed=position), position) for position in range(len(reference))]
    together = choose(reference, draws)
    alone = torch.cat([choose(reference[i : i + 1], draws[i : i + 1]) for i in range(len(draws))])
    scores = torch.cat([logprobs(reference[i : i + 1]) for i in range(len(draws))])
    _expect(torch.equal(together, alone) and torch.equal(logprobs(reference), scores), "sampling")
    return hashlib.sha256(reference.numpy().tobytes()).hexdigest()


def _task(ids: list[int], index: int) -> VerifyTask:
    first = RESERVED_BLOCKS + index * _BLOCKS_EACH
    task = VerifyTask(ids, [], 0, Sampling(temperature=0.0), frozenset(), top=0)
    # The blocks need no clearing: they are new.
    task.lease = Lease(list(range(first, first + _BLOCKS_EACH)), cached=0, fixed=0, fresh=[], copy=None, shared=[])
    return task


def _expect(holds: bool, invariant: str) -> None:
    if not holds:
        raise InvarianceError(f"the fixed lane's bits change with: {invariant}")
