"""What the engine has done and what it is doing: counted on its own thread, read from any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from backend.engine.lane_costs import Advice, Kind
from backend.engine.scheduler import Lane, Pass
from backend.engine.tasks import Task, VerifyTask

Use = Literal["verified", "draft", "stream"]


@dataclass(slots=True)
class Totals:
    """Sums since the start."""

    passes: Counter[Lane] = field(default_factory=Counter)
    rows: Counter[Lane] = field(default_factory=Counter)
    seconds: dict[Lane, float] = field(default_factory=dict)
    tokens: Counter[Use] = field(default_factory=Counter)
    windows: int = 0
    rollbacks: int = 0
    drafted: int = 0
    rolled_back: int = 0

    def add_pass(self, work: Pass, seconds: float) -> None:
        """Count a pass that ran."""
        self.passes[work.lane] += 1
        self.rows[work.lane] += sum(span.count for span in work.spans)
        self.seconds[work.lane] = self.seconds.get(work.lane, 0.0) + seconds

    def add_ended(self, task: Task) -> None:
        """Count what a task that ended has produced."""
        if not isinstance(task, VerifyTask):
            self.tokens["draft" if task.is_draft else "stream"] += len(task.produced)
            return
        self.tokens["verified"] += len(task.produced)
        if task.draft:
            refused = len(task.draft) - task.agreed
            self.windows += 1
            self.rollbacks += refused > 0
            self.drafted += len(task.draft)
            self.rolled_back += refused


@dataclass(frozen=True, slots=True)
class Stats:
    """A look at the engine. `pass_costs` are seconds by kind of pass and number of rows, as the engine estimates them.

    `windows` counts verified drafts, `rollbacks` those refused in part; `drafted` and `rolled_back` count tokens.
    """

    passes: Mapping[Lane, int]
    rows: Mapping[Lane, int]
    seconds: Mapping[Lane, float]
    tokens: Mapping[Use, int]
    windows: int
    rollbacks: int
    drafted: int
    rolled_back: int
    advice: Mapping[Advice, int]
    pass_costs: Mapping[tuple[Kind, int], float]
    running: int
    waiting: int
    blocks: int
    blocks_available: int
    evictions: int
    preemptions: int
