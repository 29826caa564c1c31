"""The probe finds every kind of broken invariant, and passes a lane that has none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest

from backend.protocol import VerifyShape
from backend.sglang.passes import Choice, Done, Span
from backend.sglang.probe import InvarianceError, probe

SHAPE = VerifyShape(groups=4, window=16)


class Lane:
    """A fixed lane of digests instead of numbers; `leak` is what a row's bits depend on besides its prefix."""

    def __init__(self, leak: Callable[[int, int, Sequence[Span]], object]):
        self._leak = leak
        self.kv: dict[tuple[int, ...], object] = {}

    async def run(self, spans: Sequence[Span]) -> list[Done]:
        done = []
        for slot, span in enumerate(spans):
            start = min(span.wanted, len(span.tokens) if span.redo is None else span.redo)
            for row in range(start, len(span.tokens)):
                self.kv[tuple(span.tokens[: row + 1])] = self._leak(slot, row - start, spans)
            rows = range(max(start, span.wanted), len(span.tokens))
            done.append(Done(start, len(span.tokens), [self._choice(span.tokens[: row + 1]) for row in rows]))
        return done

    def _choice(self, prefix: list[int]) -> Choice:
        state = [(token, self.kv[tuple(prefix[: row + 1])]) for row, token in enumerate(prefix)]
        return Choice(prefix[-1], -1.0, [], hashlib.sha256(repr(state).encode()).hexdigest())


def nothing(slot: int, offset: int, spans: Sequence[Span]) -> object:
    return None


async def test_a_lane_that_holds_passes_and_has_a_digest() -> None:
    digest = await probe(Lane(nothing).run, SHAPE, 331, 4000)
    assert digest == await probe(Lane(nothing).run, SHAPE, 331, 4000)
    assert digest != await probe(Lane(lambda *_: 1).run, SHAPE, 331, 4000)


@pytest.mark.parametrize(
    "leak",
    [
        lambda slot, offset, spans: slot,
        lambda slot, offset, spans: offset % 4,
        lambda slot, offset, spans: len(spans),
        lambda slot, offset, spans: len(spans[0].tokens) > 135,
        lambda slot, offset, spans: sum(len(span.tokens) - (span.redo or 0) for span in spans) > 60,
    ],
    ids=["slot", "offset", "company", "padding", "rows"],
)
async def test_a_lane_that_leaks_is_refused(leak: Callable[[int, int, Sequence[Span]], object]) -> None:
    with pytest.raises(InvarianceError, match="the fixed lane's bits change with"):
        await probe(Lane(leak).run, SHAPE, 331, 4000)
