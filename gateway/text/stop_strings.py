"""Where a growing text must be cut for the sake of stop strings.

Theory of operation. Text goes in piece by piece, comes out as soon as it cannot be the beginning of a stop string any
more, and is cut exactly before the stop string that is complete first; of those complete at the same character, before
the longest. That rule speaks of characters only, so the cut does not depend on where pieces begin and end.

Owns the text held back. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A filter over one text. After a cut it must not be used again."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._held = ""

    def __repr__(self) -> str:
        return f"<StopStrings {self._stops!r} held={self._held!r}>"

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether it ends before a stop string."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back, once no more is coming."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
