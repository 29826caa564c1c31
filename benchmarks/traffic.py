"""Completions straight on an engine, some verified and some in mode off, without HTTP in between.

Drives verified ones with the gateway's own state machine (gateway.dvr). Tokens count when they are final: when decoded
in mode off, when committed in mode verified. When completions begin is the caller's business (closed_loop, open_loop).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import Sampling
from benchmarks.prompts import Prompts
from gateway.domain import Counts, Finished, Job, Token
from gateway.dvr import Draft, Loop, Verdict, Verifier, Verify

_TOLD_S = 0.001
"""In less than this the engine tells of all that a pass has brought; no pass is as short."""


@dataclass(frozen=True, slots=True)
class Way:
    """How completions are served: `adaptive` follows the engine's advice, otherwise every window is drafted."""

    windows: tuple[int, ...]
    sampling: Sampling
    adaptive: bool


class Completion:
    """One request on its way. Also the listener of its task; what it hears goes to the queue of its traffic."""

    def __init__(self, events: SimpleQueue[_Event], loop: Loop | None):
        self._events = events
        self.loop = loop
        self.task: Task | None = None
        self.counts = Counts()

    @property
    def verified(self) -> bool:
        return self.loop is not None

    def produced(self, tokens: Sequence[Scored]) -> None:
        self._events.put((self, len(tokens), time.perf_counter()))

    def ended(self) -> None:
        self._events.put((self, None, time.perf_counter()))

    def failed(self, error: Exception) -> None:
        self._events.put((self, error, time.perf_counter()))


_Event = tuple[Completion, int | Exception | None, float]


@dataclass(frozen=True, slots=True)
class News:
    """Something happened to a completion at `time_s` (of perf_counter): `tokens` became final, or it ended."""

    completion: Completion
    tokens: int
    ended: bool
    time_s: float


class Traffic:
    """The completions in flight on one engine."""

    def __init__(self, engine: Engine, way: Way):
        self._engine = engine
        self._way = way
        self._verifier = Verifier(engine.info.fingerprint, engine.info.vocab_size)
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self.in_flight: list[Completion] = []

    def begin(self, prompt: list[int], count: int, *, verified: bool) -> Completion:
        """Ask for `count` tokens after the prompt."""
        if verified:
            job = Job(tuple(prompt), self._way.sampling, count, (), top_logprobs=0)
            completion = Completion(self._events, Loop(job, self._way.windows, self._verifier))
            assert completion.loop is not None
            self._obey(completion, completion.loop.start())
        else:
            completion = Completion(self._events, None)
            self._submit(completion, DecodeTask(prompt, count, self._way.sampling, frozenset(), 0, is_draft=False))
        self.in_flight.append(completion)
        return completion

    def more_at_once(self) -> bool:
        """Whether there is more news of the same pass, or of one that has ended meanwhile."""
        time.sleep(_TOLD_S)
        return not self._events.empty()

    def hear(self, timeout_s: float | None = None) -> News | None:
        """Wait for the next news; None after the timeout. Raises what a call failed with."""
        try:
            completion, what, time_s = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(what, Exception):
            raise what
        tokens, ended = self._hear(completion, what)
        if ended:
            self.in_flight.remove(completion)
        return News(completion, tokens, ended, time_s)

    def stop(self) -> None:
        """Cancel what is in flight, and wait until the engine has let go of it."""
        for completion in self.in_flight:
            assert completion.task is not None
            gone = threading.Event()
            self._engine.cancel(completion.task, gone.set)
            gone.wait()
        self.in_flight.clear()

    def _hear(self, completion: Completion, produced: int | None) -> tuple[int, bool]:
        """How many tokens became final, and whether the completion ended."""
        loop, task = completion.loop, completion.task
        if produced is not None:
            return (produced if loop is None else 0), False
        if loop is None:
            return 0, True
        if isinstance(task, DecodeTask):
            self._obey(completion, loop.on_draft([token.id for token in task.produced]))
            return 0, False
        assert isinstance(task, VerifyTask)
        tokens = tuple(Token(token.id, token.logprob) for token in task.produced)
        wants_draft = task.wants_draft or not self._way.adaptive
        verdict = Verdict(task.agreed, tokens, task.finish, self._verifier.fingerprint, wants_draft)
        commit, command = loop.on_verdict(verdict)
        completion.counts = commit.counts
        if not isinstance(command, Finished):
            self._obey(completion, command)
        return len(tokens), isinstance(command, Finished)

    def _obey(self, completion: Completion, command: Draft | Verify | Finished) -> None:
        sampling = self._way.sampling
        match command:
            case Draft(context=context, count=count):
                task: Task = DecodeTask(list(context), count, sampling, frozenset(), 0, is_draft=True)
            case Verify(context=context, draft=draft, extend=extend):
                task = VerifyTask(list(context), list(draft), extend, sampling, frozenset(), 0)
            case Finished():
                raise AssertionError("a completion does not end before its first token")
        self._submit(completion, task)

    def _submit(self, completion: Completion, task: Task) -> None:
        completion.task = task
        self._engine.submit(task, completion)


def numbered(prompts: Prompts, first: int, length: int) -> Iterator[list[int]]:
    """Prompts number first, first + 1, ... of `length` tokens, without end."""
    number = first
    while True:
        yield prompts.of_length(number, length)
        number += 1
