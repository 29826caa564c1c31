"""Which rows run next: batching and progress of tasks, without tensors, clock or threads. Who may run is admission's.

Every pass has a budget of rows: G x W in the fixed lane, `prefill_rows` of prompts in the fast lane, a row for each
task that decodes. Longer prompts are cut into chunks.

Rules:
- Queues with work take turns, pass by pass: the fast lane, the fixed lane, and the tasks that want a batch of one. So
  none of these kinds of traffic starves.
- Where the fixed lane's arithmetic does not depend on the number of rows, its tasks that decode (one row each) share a
  pass, and the fast lane's decoding tasks ride along in it: one pass over the weights serves both.
- In the fast lane, prefill and decoding take turns in the same way. A decode pass takes a row of every decoding task.
- In the fixed lane, the decoding pass takes turns with the others, and within these, tasks in order of arrival: those
  with at most a window of rows left share a pass of up to G of them; longer ones (prompts) share a pass of G x W rows
  where the arithmetic allows it, else have W rows each.
- A group of fewer than G windows waits for more while drafts are being decoded, for at most `group_wait` passes.
- Tasks with a batch of one run one after the other, each to its end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from backend.engine.admission import Admission
from backend.engine.lane_costs import Advice, LaneCosts
from backend.engine.tasks import DecodeTask, Scored, Task, Unchosen, VerifyTask
from backend.protocol import VerifyShape

Lane = Literal["fast", "fixed"]
_Queue = Literal["fast", "fixed", "alone"]
_TURNS: tuple[_Queue, ...] = ("fast", "fixed", "alone")
_ADVISED_EVERY = 16  # Tokens of a stream that yields: changing over costs some passes.


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
    """The tasks that ended with a pass, and those it broke, with the reason."""

    ended: list[Task]
    broken: list[tuple[Task, Unchosen]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler keeps to: the fixed shape, rows of a prefill pass, tokens of a context, passes of a wait."""

    shape: VerifyShape
    max_context: int
    prefill_rows: int
    group_wait: int


class Scheduler:
    """Owns every task between submission and its end."""

    def __init__(self, admission: Admission, limits: Limits, shape_invariant: bool, costs: LaneCosts):
        self.admission = admission
        self._shape = limits.shape
        self._limits = limits
        self._shape_invariant = shape_invariant
        self._costs = costs
        self._prefilling: deque[DecodeTask] = deque()
        self._decoding: list[DecodeTask] = []  # Oldest first.
        self._fixed: deque[Task] = deque()
        self._alone: deque[DecodeTask] = deque()
        self._last_queue: _Queue = "alone"
        self._prefilled_last = False
        self._decoded_last = False
        self._waited = 0  # Passes for which the windows have waited for more of them.
        self.advice: Counter[Advice] = Counter()
        """How often verify calls were told which way to go on, and why."""

    def __repr__(self) -> str:
        return (
            f"<Scheduler prefilling={len(self._prefilling)} decoding={len(self._decoding)}"
            f" fixed={len(self._fixed)} alone={len(self._alone)} {self.admission!r}>"
        )

    def submit(self, task: Task) -> None:
        """Queue a task. Raises QueueFullError past the bound."""
        self.admission.submit(task)

    def end(self, task: Task) -> None:
        """Drop a task wherever it is and free what it holds."""
        self._drop(task)
        self.admission.end(task)

    def admit(self) -> list[Task]:
        """Let in who can be let in; the caller prepares the blocks of each one's lease."""
        changes = self.admission.admit()
        for stream in changes.preempted:
            self._drop(stream)
        for task in changes.admitted:
            assert task.lease is not None
            # The row before the first choice runs again even where it is cached: its logits are needed.
            if isinstance(task, VerifyTask):
                task.computed = min(task.lease.fixed, len(task.context) - 1)
                self._fixed.append(task)
            elif task.in_fixed_lane:
                task.computed = min(task.lease.fixed, len(task.tokens) - 1)
                self._fixed.append(task)
            else:
                task.computed = min(task.lease.cached, len(task.tokens) - 1)
                self._file(task)
        return changes.admitted

    def next_pass(self) -> Pass | None:
        """The rows to run now, or None where there is nothing to do."""
        while (queue := self._next_queue()) is not None:
            work = self._pass_of(queue)
            # A pass is empty where every stream of it has lost its memory to calls, which then have their turn.
            if work.spans:
                return work
        return None

    def observe(self, done: Pass, seconds: float) -> None:
        """Keep the costs current with what a pass took; prompts say nothing of decoding and are left out."""
        counts = [span.count for span in done.spans]
        context = sum(span.start + span.count for span in done.spans) / len(counts)
        if max(counts) == 1:
            self._costs.observe(done.lane, len(counts), context, seconds)
        elif done.lane == "fixed" and max(counts) <= self._shape.window:
            self._costs.observe("window", sum(counts), context, seconds)

    def apply(self, done: Pass, chosen: Sequence[Sequence[Scored | Unchosen]]) -> Outcome:
        """Take a pass's results: `choices` for each span. A row without a token breaks its task, unless it lies behind
        a refused draft.
        """
        outcome = Outcome([], [])
        for span, tokens in zip(done.spans, chosen, strict=True):
            task = span.task
            task.computed = span.start + span.count
            broken: Unchosen | None = None
            for token in tokens:
                if isinstance(token, Unchosen):
                    broken = token
                elif isinstance(task, VerifyTask):
                    self._commit(task, token)
                else:
                    self._extend(task, token)
                if broken or task.done or task.computed < span.start + span.count:
                    break  # What follows was computed behind a refused draft.
            if broken:
                self.fail(task)
                outcome.broken.append((task, broken))
            elif task.done:
                if isinstance(task, VerifyTask):
                    self._costs.observe_verdict(len(task.draft), task.agreed)
                    task.wants_draft = self._advise()
                self.end(task)
                outcome.ended.append(task)
            elif isinstance(task, DecodeTask) and task in self._prefilling:
                self._prefilling.remove(task)
                self._file(task)
        return outcome

    def fail(self, task: Task) -> None:
        """Drop a task whose pass broke: nothing it computed is kept."""
        task.computed = 0
        self.end(task)

    def _advise(self) -> bool:
        """Whether verified tokens had better be drafted now."""
        running = self.admission.running
        verified = sum(other.in_fixed_lane or (isinstance(other, DecodeTask) and other.is_draft) for other in running)
        context = sum(len(task.tokens) for task in running) / max(len(running), 1)
        advice = self._costs.advise(len(running), verified, context)
        self.advice[advice] += 1
        return advice.drafts

    def _file(self, task: DecodeTask) -> None:
        if task.batching == "none":
            self._alone.append(task)
        elif len(task.tokens) - task.computed == 1:
            self._decoding.append(task)
        else:
            self._prefilling.append(task)

    def _drop(self, task: Task) -> None:
        """Take a task out of the lists of those that run, if it does."""
        for tasks in (self._prefilling, self._decoding, self._fixed, self._alone):
            if task in tasks:
                tasks.remove(task)  # type: ignore[arg-type]

    def _extend(self, task: DecodeTask, token: Scored) -> None:
        task.tokens.append(token.id)
        task.produced.append(token)
        if token.id in task.stop_ids:
            task.finish = "stop"
        elif len(task.tokens) >= self._limits.max_context:
            task.finish = "length"
        elif task.yields and not task.done and len(task.produced) % _ADVISED_EVERY == 1:
            self._costs.observe_verdict(0, 0)
            task.yielded = self._advise()

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
            task.done = True
        if token.id in task.stop_ids:
            task.finish = "stop"
        elif position + 1 >= self._limits.max_context:
            task.finish = "length"
        if task.finish is not None:
            task.done = True

    def _next_queue(self) -> _Queue | None:
        """Whose turn it is, of the queues that have something to run."""
        # Decoding tasks ride along in the fixed lane's decoding pass where there is one.
        has_fast = bool(self._prefilling or (self._decoding and not self._ones()))
        has_fixed = bool(self._fixed)
        if has_fast and has_fixed and self._awaits_windows():
            self._waited += 1
            has_fixed = False
        ready = {"fast": has_fast, "fixed": has_fixed, "alone": bool(self._alone)}
        at = _TURNS.index(self._last_queue) + 1
        return next((queue for queue in (*_TURNS[at:], *_TURNS[:at]) if ready[queue]), None)

    def _pass_of(self, queue: _Queue) -> Pass:
        self._last_queue = queue
        if queue == "fixed":
            return self._fixed_pass()
        if queue == "alone":
            return Pass("fast", self._prefill_spans([self._alone[0]]))
        prefills = bool(self._prefilling) and (bool(self._ones()) or not (self._decoding and self._prefilled_last))
        self._prefilled_last = prefills
        return Pass("fast", self._prefill_spans(self._prefilling)) if prefills else self._decode_pass("fast", [])

    def _decode_pass(self, lane: Lane, ones: Sequence[Task]) -> Pass:
        """A row of each of `ones`, which decode in the fixed lane, and of every task that decodes in the fast lane."""
        fresh = self._make_room([*ones, *self._decoding])
        # Whoever lost its memory to make room is no longer in a queue.
        left = [task for task in ones if task.lease is not None]
        spans = [*map(self._fixed_row, left), *(Span(task, task.computed, 1, 1) for task in self._decoding)]
        return Pass(lane, spans, fresh)

    def _make_room(self, tasks: Sequence[Task]) -> list[int]:
        """Get the streams among them the block that their next row needs; some may be preempted for it."""
        changes = self.admission.make_room([task for task in tasks if isinstance(task, DecodeTask)])
        for task in changes.preempted:
            self._drop(task)
        return changes.fresh

    def _prefill_spans(self, tasks: Iterable[DecodeTask]) -> list[Span]:
        spans: list[Span] = []
        budget = self._limits.prefill_rows
        for task in tasks:
            count = min(len(task.tokens) - task.computed, budget)
            if count == 0:
                break
            budget -= count
            last = task.computed + count == len(task.tokens)
            spans.append(Span(task, task.computed, count, int(last)))
        return spans

    def _fixed_pass(self) -> Pass:
        ones = self._ones()
        others = [task for task in self._fixed if task not in ones]
        self._decoded_last = bool(ones) and not (others and self._decoded_last)
        if self._decoded_last:
            group: Sequence[Task] = ones
            work = self._decode_pass("fixed", ones)
        elif self._rows_left(others[0]) > self._shape.window:
            group, work = self._long_pass()
        else:
            group = self._windows()[: self._shape.groups]
            fresh = self._make_room(group)
            group = [task for task in group if task.lease is not None]
            work = Pass("fixed", [self._fixed_span(task, self._shape.window) for task in group], fresh)
            self._waited = 0
        for task in group:
            if task in self._fixed:
                self._fixed.remove(task)
                self._fixed.append(task)
        return work

    def _long_pass(self) -> tuple[list[Task], Pass]:
        """A pass for tasks with more than a window left: one of them, or as many as fill G x W rows."""
        if not self._shape_invariant:
            return [self._fixed[0]], Pass("fixed", [self._fixed_span(self._fixed[0], self._shape.window)])
        budget = self._shape.groups * self._shape.window
        group: list[Task] = []
        spans: list[Span] = []
        for task in self._fixed:
            if budget > 0 and self._rows_left(task) > self._shape.window:
                group.append(task)
                spans.append(self._fixed_span(task, budget))
                budget -= spans[-1].count
        return group, Pass("fixed", spans)

    def _ones(self) -> list[Task]:
        """Tasks of the fixed lane with one row left, where such rows make a pass of their own."""
        return [task for task in self._fixed if self._shape_invariant and self._rows_left(task) == 1]

    def _windows(self) -> list[Task]:
        """Tasks of the fixed lane that fit a window."""
        # Rows of one sequence beside windows would be padded to their width; they have a pass of their own.
        least = 2 if self._shape_invariant else 1
        return [task for task in self._fixed if least <= self._rows_left(task) <= self._shape.window]

    def _awaits_windows(self) -> bool:
        """Whether all that the fixed lane could run is a group of windows that may still grow."""
        windows = self._windows()
        return (
            len(windows) == len(self._fixed) < self._shape.groups
            and self._waited < self._limits.group_wait
            and all(isinstance(task, VerifyTask) and task.draft for task in windows)  # Prompts do not wait.
            and any(task.is_draft for task in (*self._prefilling, *self._decoding))
        )

    def _fixed_row(self, task: Task) -> Span:
        return self._fixed_span(task, 1)

    def _fixed_span(self, task: Task, limit: int) -> Span:
        count = min(self._rows_left(task), limit)
        if isinstance(task, DecodeTask):
            return Span(task, task.computed, count, int(task.computed + count == len(task.tokens)))
        first_choice = max(task.computed, len(task.context) - 1)
        return Span(task, task.computed, count, max(0, task.computed + count - first_choice))

    @staticmethod
    def _rows_left(task: Task) -> int:
        return len(task.tokens) - task.computed
