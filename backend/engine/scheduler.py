"""Which rows run next: batching and progress of tasks, without tensors, clock or threads. Who may run is admission's.

Rules:
- Lanes take turns. While both have work, a fixed-lane pass follows a fast-lane pass and the other way round, so neither
  kind of traffic starves.
- Where the fixed lane's arithmetic does not depend on the number of rows, its tasks that decode (one row each) share a
  pass, and the fast lane's decoding tasks ride along in it: one pass over the weights serves both.
- In the fast lane, prefill and decoding take turns in the same way. A decode pass takes a row of every decoding task.
- In the fixed lane, the decoding pass takes turns with the others, and within these, tasks in order of arrival: those
  with at most a window of rows left share a pass of up to G of them; longer ones (prompts) share a pass of G x W rows
  where the arithmetic allows it, else have W rows each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backend.engine.admission import Admission
from backend.engine.lane_costs import LaneCosts
from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import VerifyShape

Lane = Literal["fast", "fixed"]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one task, from position `start`. The last `choices` of them choose a token each."""

    task: Task
    start: int
    count: int
    choices: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass in one lane. The blocks in `fresh` are to be cleared before it."""

    lane: Lane
    spans: Sequence[Span]
    fresh: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tasks that ended with a pass, and those it broke."""

    ended: list[Task]
    broken: list[Task]


class Scheduler:
    """Owns every task between submission and its end."""

    def __init__(
        self,
        admission: Admission,
        shape: VerifyShape,
        shape_invariant: bool,
        max_context: int,
        prefill_rows: int,
        costs: LaneCosts,
    ):
        self._admission = admission
        self._shape = shape
        self._shape_invariant = shape_invariant
        self._costs = costs
        self._max_context = max_context
        self._prefill_rows = prefill_rows
        self._prefilling: deque[DecodeTask] = deque()
        self._decoding: list[DecodeTask] = []  # Oldest first.
        self._verifying: deque[VerifyTask] = deque()
        self._last_lane: Lane = "fast"
        self._prefilled_last = False
        self._decoded_last = False

    def __repr__(self) -> str:
        return (
            f"<Scheduler prefilling={len(self._prefilling)} decoding={len(self._decoding)}"
            f" verifying={len(self._verifying)} {self._admission!r}>"
        )

    def submit(self, task: Task) -> None:
        """Queue a task. Raises QueueFullError past the bound."""
        self._admission.submit(task)

    def end(self, task: Task) -> None:
        """Drop a task wherever it is and free what it holds."""
        self._drop(task)
        self._admission.end(task)

    def admit(self) -> list[Task]:
        """Let in who can be let in; the caller prepares the blocks of each one's lease."""
        changes = self._admission.admit()
        for stream in changes.preempted:
            self._drop(stream)
        for task in changes.admitted:
            assert task.lease is not None
            # The row before the first choice runs again even where it is cached: its logits are needed.
            if isinstance(task, VerifyTask):
                task.computed = min(task.lease.fixed, len(task.context) - 1)
                self._verifying.append(task)
            else:
                task.computed = min(task.lease.cached, len(task.tokens) - 1)
                self._file(task)
        return changes.admitted

    def next_pass(self) -> Pass | None:
        """The rows to run now, or None where there is nothing to do."""
        # Decoding tasks ride along in the fixed lane's decoding pass where there is one.
        rides = self._shape_invariant and any(self._rows_left(task) == 1 for task in self._verifying)
        has_fast = bool(self._prefilling or (self._decoding and not rides))
        if self._verifying and (not has_fast or self._last_lane == "fast"):
            self._last_lane = "fixed"
            return self._fixed_pass()
        if has_fast:
            self._last_lane = "fast"
            prefills = bool(self._prefilling) and (rides or not (self._decoding and self._prefilled_last))
            self._prefilled_last = prefills
            work = Pass("fast", self._prefill_spans()) if prefills else self._decode_pass("fast", [])
            if work.spans:
                return work
            # Every stream that decodes has lost its memory to calls: these come first.
            return self._fixed_pass() if self._verifying else Pass("fast", self._prefill_spans())
        return None

    def apply(self, done: Pass, chosen: Sequence[Sequence[Scored | None]]) -> Outcome:
        """Take a pass's results: `choices` tokens for each span, None for a row whose logits were not finite.

        Such a row breaks its task, unless it lies behind a refused draft.
        """
        outcome = Outcome([], [])
        for span, tokens in zip(done.spans, chosen, strict=True):
            task = span.task
            task.computed = span.start + span.count
            broken = False
            for token in tokens:
                if token is None:
                    broken = True
                elif isinstance(task, VerifyTask):
                    self._commit(task, token)
                else:
                    self._extend(task, token)
                if broken or task.done or task.computed < span.start + span.count:
                    break  # What follows was computed behind a refused draft.
            if broken:
                self.fail(task)
                outcome.broken.append(task)
            elif task.done:
                if isinstance(task, VerifyTask):
                    self._costs.observe_verdict(len(task.draft), task.agreed)
                    task.wants_draft = self._wants_draft()
                self.end(task)
                outcome.ended.append(task)
            elif isinstance(task, DecodeTask) and task not in self._decoding:
                self._prefilling.remove(task)
                self._file(task)
        return outcome

    def fail(self, task: Task) -> None:
        """Drop a task whose pass broke: nothing it computed is kept."""
        task.computed = 0
        self.end(task)

    def _wants_draft(self) -> bool:
        drafts = sum(task.is_draft for task in (*self._prefilling, *self._decoding))
        verified = len(self._verifying) + drafts
        return not self._shape_invariant or self._costs.prefer_drafts(self._admission.running, verified)

    def _file(self, task: DecodeTask) -> None:
        if len(task.tokens) - task.computed == 1:
            self._decoding.append(task)
        else:
            self._prefilling.append(task)

    def _drop(self, task: Task) -> None:
        """Take a task out of the lists of those that run, if it does."""
        for tasks in (self._prefilling, self._decoding, self._verifying):
            if task in tasks:
                tasks.remove(task)  # type: ignore[arg-type]

    def _extend(self, task: DecodeTask, token: Scored) -> None:
        task.tokens.append(token.id)
        task.produced.append(token)
        if token.id in task.stop_ids:
            task.finish = "stop"
        elif len(task.tokens) >= self._max_context:
            task.finish = "length"

    def _commit(self, task: VerifyTask, token: Scored) -> None:
        """Take the verifier's next token: it agrees with the draft, or replaces what is left of it."""
        index = len(task.produced)
        position = len(task.context) + index
        task.produced.append(token)
        if index < len(task.draft) and task.agreed == index and token.id == task.draft[index]:
            task.agreed += 1
        else:
            task.tokens[position:] = [token.id]
            task.computed = position
            task.done = len(task.produced) > task.agreed + task.extend
        if token.id in task.stop_ids:
            task.finish = "stop"
        elif position + 1 >= self._max_context:
            task.finish = "length"
        if task.finish is not None:
            task.done = True

    def _decode_pass(self, lane: Lane, spans: list[Span]) -> Pass:
        """`spans`, and a row of every decoding task. Streams get the block their row needs, or are preempted for it."""
        streams = [task for task in self._decoding if not task.is_draft]
        changes = self._admission.make_room(streams)
        for task in changes.preempted:
            self._drop(task)
        return Pass(lane, [*spans, *(Span(task, task.computed, 1, 1) for task in self._decoding)], changes.fresh)

    def _prefill_spans(self) -> list[Span]:
        spans: list[Span] = []
        budget = self._prefill_rows
        for task in self._prefilling:
            count = min(len(task.tokens) - task.computed, budget)
            if count == 0:
                break
            budget -= count
            last = task.computed + count == len(task.tokens)
            spans.append(Span(task, task.computed, count, int(last)))
        return spans

    def _fixed_pass(self) -> Pass:
        ones = [task for task in self._verifying if self._shape_invariant and self._rows_left(task) == 1]
        others = [task for task in self._verifying if task not in ones]
        self._decoded_last = bool(ones) and not (others and self._decoded_last)
        if self._decoded_last:
            group = ones
            work = self._decode_pass("fixed", [self._fixed_span(task, 1) for task in group])
        elif self._rows_left(others[0]) > self._shape.window:
            group, work = self._long_pass()
        else:
            # Rows of one sequence beside windows would be padded to their width; they have a pass of their own.
            short = [task for task in others if self._rows_left(task) <= self._shape.window]
            group = short[: self._shape.groups]
            work = Pass("fixed", [self._fixed_span(task, self._shape.window) for task in group])
        for task in group:
            self._verifying.remove(task)
            self._verifying.append(task)
        return work

    def _long_pass(self) -> tuple[list[VerifyTask], Pass]:
        """A pass for tasks with more than a window left: one of them, or as many as fill G x W rows."""
        if not self._shape_invariant:
            return [self._verifying[0]], Pass("fixed", [self._fixed_span(self._verifying[0], self._shape.window)])
        budget = self._shape.groups * self._shape.window
        group: list[VerifyTask] = []
        spans: list[Span] = []
        for task in self._verifying:
            if budget > 0 and self._rows_left(task) > self._shape.window:
                group.append(task)
                spans.append(self._fixed_span(task, budget))
                budget -= spans[-1].count
        return group, Pass("fixed", spans)

    def _fixed_span(self, task: VerifyTask, limit: int) -> Span:
        count = min(self._rows_left(task), limit)
        first_choice = max(task.computed, len(task.context) - 1)
        return Span(task, task.computed, count, max(0, task.computed + count - first_choice))

    @staticmethod
    def _rows_left(task: VerifyTask) -> int:
        return len(task.tokens) - task.computed
