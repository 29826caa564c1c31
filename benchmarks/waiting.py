"""A listener that tells one callable how its task ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.engine.tasks import Scored


@dataclass(frozen=True, slots=True)
class Ending:
    """`tell` is called once, from the engine's thread, with None or with what went wrong."""

    tell: Callable[[Exception | None], object]

    def produced(self, tokens: Sequence[Scored]) -> None:
        pass

    def ended(self) -> None:
        self.tell(None)

    def failed(self, error: Exception) -> None:
        self.tell(error)
