"""What the backends computed, position by position, and what of it more than once without need.

A position is computed again with reason where somebody died, or a gateway could not ask its Redis in time, soon after
it was computed first: that work may not have reached the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

BEFORE_S, AFTER_S = 0.5, 3.0
"""Such a reason counts from so long before the first computation to so long behind it."""


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of positions; `needless` names those computed again for no reason."""

    logs: int
    computed: int
    again: int
    needless: list[str]


def work(record: Path, reasons: Sequence[float]) -> Work:
    """Read the record of counting_engine.py; `reasons` are moments, in seconds since 1970."""
    computed: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in record.read_text().splitlines():
        at, log, first, count = line.split()
        for position in range(int(first), int(first) + int(count)):
            computed[log, position].append(float(at))
    needless, again = [], 0
    for (log, position), times in computed.items():
        times.sort()
        again += len(times) - 1
        needless += [
            f"{log} at {position}: {first:.2f} and {second:.2f}"
            for first, second in pairwise(times)
            if not any(first - BEFORE_S <= reason <= first + AFTER_S for reason in reasons)
        ]
    return Work(len({log for log, _ in computed}), sum(map(len, computed.values())), again, needless)
