"""What the verified completions of one model took: counted where tokens are generated, once, however many read them.

The words are the engine's (docs/metrics.md): a window is `agreed` where all of its draft stood, `rolled_back` where
some did not; `undrafted` ones had no draft to agree with.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias, get_args

from gateway.telemetry.histogram import Histogram

Outcome: TypeAlias = Literal["agreed", "rolled_back"]
WindowOutcome: TypeAlias = Literal["agreed", "rolled_back", "undrafted"]
TokenSource: TypeAlias = Literal["drafted", "verifier", "decoded", "log"]
"""Where a committed token came from: a draft that stood, the verifier's own word behind one, a decode call of the
verifier's, or the commit log."""

POSITIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Work:
    """Sums since the start. `rolled_back_at` has the positions in answers of the first token of a draft that fell."""

    def __init__(self) -> None:
        # From 0 on: a counter that comes into being with its first event has no rate for it.
        self.windows: Counter[WindowOutcome] = Counter(dict.fromkeys(get_args(WindowOutcome), 0))
        self.drafted: Counter[Outcome] = Counter(dict.fromkeys(get_args(Outcome), 0))
        self.committed: Counter[TokenSource] = Counter(dict.fromkeys(get_args(TokenSource), 0))
        self.rolled_back_at = Histogram(POSITIONS)

    def __repr__(self) -> str:
        return f"<Work windows={dict(self.windows)} drafted={dict(self.drafted)} committed={dict(self.committed)}>"

    def verified(self, position: int, drafted: int, agreed: int, tokens: int) -> None:
        """A draft for `position` came back from the verifier, with so many tokens that stand."""
        if not drafted:
            self.windows["undrafted"] += 1
        elif agreed == drafted:
            self.windows["agreed"] += 1
        else:
            self.windows["rolled_back"] += 1
            self.rolled_back_at.observe(position + agreed)
        self.drafted["agreed"] += agreed
        self.drafted["rolled_back"] += drafted - agreed
        self.committed["drafted"] += agreed
        self.committed["verifier"] += tokens - agreed

    def decoded(self, tokens: int, *, begins: bool) -> None:
        """Tokens came from a decode call, the first ones of it or more."""
        self.windows["undrafted"] += begins
        self.committed["decoded"] += tokens

    def recalled(self, tokens: int) -> None:
        """A completion took tokens out of the commit log that were not generated for it."""
        self.committed["log"] += tokens
