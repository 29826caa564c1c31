"""The start-up probe: does a lane hold the invariants on these weights, on this machine?

Runs one short sequence alone, then again in other windows, slots, companies and paddings, and compares logits bitwise.
Keys and values are compared through the logits of the rows that attend to them. It takes seconds and catches what
differs from machine to machine (a library's choice of kernel, say); the tests go much further. Where bits differ, both
ways are run once more under a trace, to name the op at fault.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from backend.engine.checkpoint import ModelConfig
from backend.engine.kv_pool import RESERVED_BLOCKS
from backend.engine.op_trace import OpTrace
from backend.engine.prefix_cache import Lease
from backend.engine.runner import Runner
from backend.engine.scheduler import Lane, Pass, Span
from backend.engine.tasks import VerifyTask
from backend.kernels.attention import BLOCK
from backend.kernels.sampling import Draw, choose
from backend.protocol import Sampling, VerifyShape

_LENGTH = 2 * BLOCK + 9
_CHECKED = 6  # The last rows, whose logits are compared.
_BLOCKS_EACH = -(-_LENGTH // BLOCK) + 1
_SEQUENCES = 4
PROBE_BLOCKS = _BLOCKS_EACH * _SEQUENCES
"""Blocks of KV that the probe needs."""


class InvarianceError(Exception):
    """A lane's bits depend on something they must not depend on; the message names it, and the op."""


@dataclass(frozen=True, slots=True)
class _Variation:
    """Another way of computing the checked rows, and what it varies."""

    invariant: str
    passes: Sequence[Pass]


def probe(runner: Runner, config: ModelConfig, shape: VerifyShape, lane: Lane = "fixed") -> str:
    """Check a lane over `runner`'s own KV; a digest of the reference's logits. Raises InvarianceError."""
    length = min(_LENGTH, config.max_position)
    # Python's own generator: its sequence is fixed for all versions and platforms.
    rng = random.Random(0)  # noqa: S311  # not secret
    tasks = [_task([rng.randrange(config.vocab_size) for _ in range(length)], index) for index in range(_SEQUENCES)]
    subject = tasks[0]
    reference = _fill(lane, subject, _bounds(length, shape.window))
    expected = _logits(runner, reference, subject)
    for other in tasks[1:]:
        _logits(runner, _fill(lane, other, _bounds(length, shape.window)), other)
    variations = list(_variations(lane, tasks, shape, rng))
    if runner.ops(lane).shape_invariant:
        variations.append(_full_pass(lane, tasks, shape))
    for variation in variations:
        if not torch.equal(_logits(runner, variation.passes, subject), expected):
            culprit = _blame(runner, lane, subject, reference, variation.passes)
            raise InvarianceError(f"the {lane} lane's bits change with {variation.invariant}; first in {culprit}")

    ops = runner.ops(lane)
    draws = [Draw(Sampling(temperature=1.0, seed=position), position) for position in range(len(expected))]
    alone = torch.cat([choose(expected[i : i + 1], draws[i : i + 1], ops.sample) for i in range(len(draws))])
    scores = torch.cat([ops.logprobs(expected[i : i + 1]) for i in range(len(draws))])
    if not (torch.equal(choose(expected, draws, ops.sample), alone) and torch.equal(ops.logprobs(expected), scores)):
        raise InvarianceError("what is chosen and scored changes with company; first in sampling")
    return hashlib.sha256(expected.cpu().numpy().tobytes()).hexdigest()


def _variations(
    lane: Lane, tasks: Sequence[VerifyTask], shape: VerifyShape, rng: random.Random
) -> Iterator[_Variation]:
    subject = tasks[0]
    length = len(subject.tokens)
    head = length - _CHECKED
    uneven = [0]
    while uneven[-1] < head:
        uneven.append(min(head, uneven[-1] + rng.randint(1, shape.window)))
    yield _Variation("offset or history", _fill(lane, subject, [*uneven, length]))
    yield _Variation("offset", _fill(lane, subject, range(head, length + 1)))
    for slot in range(min(_SEQUENCES, shape.groups)):
        # Companions of other lengths, in front of the sequence and behind it.
        spans = [_rows(task, rng.randrange(max(0, head - shape.window), head), head) for task in tasks[1:]]
        spans.insert(slot, _rows(subject, head, length))
        yield _Variation("slot, company or padding", [Pass(lane, spans[: shape.groups])])


def _full_pass(lane: Lane, tasks: Sequence[VerifyTask], shape: VerifyShape) -> _Variation:
    """As many rows as prompts share in a pass, as far as the sequences have them; most libraries choose by it."""
    subject, head = tasks[0], len(tasks[0].tokens) - _CHECKED
    left, spans = shape.groups * shape.window, []
    for task in tasks:
        if (count := min(head, left)) > 0:
            spans.append(_rows(task, 0, count))
            left -= count
    rest = [*range(spans[0].count, head, shape.window), head, len(subject.tokens)]
    return _Variation("offset, history or company", [Pass(lane, spans), *_fill(lane, subject, rest)])


def _bounds(length: int, step: int) -> list[int]:
    """Windows of `step` rows, then the checked rows together."""
    return [*range(0, length - _CHECKED, step), length - _CHECKED, length]


def _fill(lane: Lane, task: VerifyTask, bounds: Sequence[int]) -> list[Pass]:
    return [Pass(lane, [_rows(task, start, stop)]) for start, stop in pairwise(bounds)]


def _rows(task: VerifyTask, start: int, stop: int) -> Span:
    return Span(task, start, stop - start, min(stop - start, _CHECKED))


def _logits(runner: Runner, passes: Sequence[Pass], subject: VerifyTask) -> torch.Tensor:
    """Logits [_CHECKED, vocab] of the subject's last rows."""
    found: list[torch.Tensor] = []
    for work in passes:
        logits = runner.forward(work)
        first = 0
        for span in work.spans:
            if span.task is subject:
                found.append(logits[first : first + span.choices])
            first += span.choices
    return torch.cat(found)[-_CHECKED:]


def _blame(
    runner: Runner, lane: Lane, subject: VerifyTask, reference: Sequence[Pass], variation: Sequence[Pass]
) -> str:
    """The first op, in the order of the program, whose rows for the subject differ between two ways."""
    expected, names = _trace(runner, lane, subject, reference)
    seen, _ = _trace(runner, lane, subject, variation)
    differing = min((key[0] for key, digest in seen.items() if expected.get(key, digest) != digest), default=None)
    if differing is None:
        return "no op that could be named"
    return f"{names[differing]} (call {differing + 1} of {len(names)} in a pass)"


def _trace(
    runner: Runner, lane: Lane, subject: VerifyTask, passes: Sequence[Pass]
) -> tuple[dict[tuple[int, int], bytes], list[str]]:
    """Digests of the subject's rows by (number of the call, position), and the name of each call's op."""
    trace = OpTrace()
    watched = runner.watched(lane, trace)
    digests: dict[tuple[int, int], bytes] = {}
    names: list[str] = []
    for work in passes:
        watched.forward(work)
        calls = trace.take()
        names = [name for name, _ in calls]
        rows = [(span.task is subject, at) for span in work.spans for at in range(span.start, span.start + span.count)]
        last = [
            (span.task is subject, at)
            for span in work.spans
            for at in range(span.start + span.count - span.choices, span.start + span.count)
        ]
        for number, (_, outputs) in enumerate(calls):
            # Behind the layers only the rows that choose are left: the final norm and the logits.
            for (ours, position), digest in zip(rows if number < len(calls) - 2 else last, outputs, strict=False):
                if ours:
                    digests[number, position] = digest
    return digests, names


def _task(ids: list[int], index: int) -> VerifyTask:
    first = RESERVED_BLOCKS + index * _BLOCKS_EACH
    task = VerifyTask(ids, [], Sampling(temperature=0.0), frozenset(), top=0)
    # The blocks need no clearing: they are new.
    task.lease = Lease(list(range(first, first + _BLOCKS_EACH)), cached=0, fixed=0, fresh=[], copy=None, shared=[])
    return task
