"""The start-up probe: does the fixed lane hold its invariants in this SGLang, on these weights and this machine?

The embedded engine's probe (backend/engine/probe.py) by other means: it speaks to the schedulers in passes like any
verify call, so that it checks what will be served, attention, pool, tree and sampler included. One sequence goes
through in windows of several sizes, in every group and in other companies; its last rows' choices, logprobs and digests
of their logits must agree.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from backend.protocol import Sampling, VerifyShape
from backend.sglang.passes import Choice, Done, Span

RunPass = Callable[[Sequence[Span]], Awaitable[list[Done]]]

_LENGTH = 137
_CHECKED = 6  # The last rows, whose logits are compared.
_SEQUENCES = 4
_CHANGES = "the fixed lane's bits change with:"


class InvarianceError(Exception):
    """The fixed lane's bits depend on something they must not depend on; the message names it."""


async def probe(run_pass: RunPass, shape: VerifyShape, vocab_size: int, max_context: int) -> str:
    """Check the fixed lane; a digest of the reference's logits. Raises InvarianceError."""
    length = min(_LENGTH, max_context - 1)
    # Python's own generator: its sequence is fixed for all versions and platforms.
    rng = random.Random(0)  # noqa: S311  # not secret
    tokens = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(_SEQUENCES)]
    head = length - _CHECKED
    step = shape.window

    def rows(index: int, start: int, stop: int) -> Span:
        """Rows [start, stop), computed anew; choices for those of them that are checked, or for the last one."""
        return Span(
            tokens=tokens[index][:stop],
            wanted=min(max(start, head), stop - 1),
            generated=0,
            sampling=Sampling(temperature=1.0, seed=index),
            stop_ids=[],
            top=2,
            redo=start,
            digests=True,
        )

    async def fill(index: int, bounds: Sequence[int]) -> list[Choice]:
        """The whole sequence, in a pass of its own between each two bounds; the last pass's choices."""
        choices: list[Choice] = []
        for start, stop in pairwise(bounds):
            [done] = await run_pass([rows(index, start, stop)])
            _expect((done.start, done.stop) == (start, stop), "the probe found no memory in the KV pool")
            choices = done.choices
        return choices

    reference = await fill(0, [*range(0, head, step), head, length])
    uneven = [0]
    while uneven[-1] < head:
        uneven.append(min(head, uneven[-1] + rng.randint(1, step)))
    _expect(await fill(0, [*uneven, length]) == reference, f"{_CHANGES} offset, history")
    # As many rows as a pass holds: several groups share the sequence.
    wide = shape.groups * step
    _expect(await fill(0, [*range(0, head, wide), head, length]) == reference, f"{_CHANGES} offset, history, slot")
    one_by_one = [(await run_pass([rows(0, at, at + 1)]))[0].choices[0] for at in range(head, length)]
    _expect(one_by_one == reference, f"{_CHANGES} offset")

    for index in range(1, _SEQUENCES):
        await fill(index, [*range(0, head, wide), head, length])
    for group in range(min(_SEQUENCES, shape.groups)):
        # Companions of other lengths, in front of the sequence and behind it.
        spans = [rows(index, rng.randrange(max(0, head - step), head), head) for index in range(1, _SEQUENCES)]
        spans.insert(group, rows(0, head, length))
        done = await run_pass(spans[: shape.groups])
        _expect(done[group].choices == reference, f"{_CHANGES} slot, company, padding, sampling")
    return hashlib.sha256("".join(choice.digest for choice in reference).encode()).hexdigest()


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvarianceError(otherwise)
