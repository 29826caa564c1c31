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
from typing import Protocol

from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import Batching, Info, Sampling
from benchmarks.grammars import TakesCalls
from benchmarks.prompts import Prompts
from gateway.domain import Counts, Finish, Job, Token
from gateway.dvr import Command, Decode, Decoded, Draft, Loop, Verdict, Verifier, Verify

_TOLD_S = 0.001
"""In less than this the engine tells of all that a pass has brought; no pass is as short."""


@dataclass(frozen=True, slots=True)
class Way:
    """How completions are served: `adaptive` follows the engine's advice, otherwise every window is drafted, and with
    `ahead` while the one before is verified. `batching` is that of mode off."""

    windows: tuple[int, ...]
    sampling: Sampling
    adaptive: bool
    ahead: bool = False
    batching: Batching = "dynamic"


class Completion:
    """One request on its way, with its calls in the engine: one in mode off, else those its loop has pending."""

    def __init__(self, loop: Loop | None):
        self.loop = loop
        self.calls: list[_Call] = []
        self.counts = Counts()

    @property
    def verified(self) -> bool:
        return self.loop is not None


class _Call:
    """A task and the command it performs. Listens to the task; what it hears goes to the queue of its traffic."""

    def __init__(self, events: SimpleQueue[_Event], completion: Completion, command: Command | None, task: Task):
        self._events = events
        self.completion = completion
        self.command = command
        self.task = task

    def produced(self, tokens: Sequence[Scored]) -> None:
        self._events.put((self, tokens, time.perf_counter()))

    def ended(self) -> None:
        self._events.put((self, None, time.perf_counter()))

    def failed(self, error: Exception) -> None:
        self._events.put((self, error, time.perf_counter()))


_Event = tuple[_Call, Sequence[Scored] | Exception | None, float]


@dataclass(frozen=True, slots=True)
class News:
    """Something happened to a completion at `time_s` (of perf_counter): `tokens` became final, or it ended."""

    completion: Completion
    tokens: int
    ended: bool
    time_s: float


class Serves(TakesCalls, Protocol):
    """An engine, or what behaves as one."""

    @property
    def info(self) -> Info: ...


class Traffic:
    """The completions in flight on one engine."""

    def __init__(self, engine: Serves, way: Way):
        self._engine = engine
        self._way = way
        self._verifier = Verifier(engine.info.fingerprint, engine.info.vocab_size)
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self.in_flight: list[Completion] = []

    def begin(self, prompt: list[int], count: int, *, verified: bool) -> Completion:
        """Ask for `count` tokens after the prompt."""
        if verified:
            loop = Loop(
                Job(tuple(prompt), self._way.sampling, count, (), top_logprobs=0),
                self._way.windows,
                self._verifier,
                ("draft", "verify", "decode") if self._way.adaptive else ("draft", "verify"),
            )
            loop.start()
            completion = Completion(loop)
            self._follow(completion, loop)
        else:
            completion = Completion(None)
            way = self._way
            task = DecodeTask(prompt, count, way.sampling, frozenset(), 0, is_draft=False, batching=way.batching)
            self._submit(completion, None, task)
        self.in_flight.append(completion)
        return completion

    def more_at_once(self) -> bool:
        """Whether there is more news of the same pass, or of one that has ended meanwhile."""
        time.sleep(_TOLD_S)
        return not self._events.empty()

    def hear(self, timeout_s: float | None = None) -> News | None:
        """Wait for the next news; None after the timeout. Raises what a call failed with."""
        try:
            call, what, time_s = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(what, Exception):
            raise what
        tokens, ended = self._hear(call, what)
        if ended:
            self.in_flight.remove(call.completion)
        return News(call.completion, tokens, ended, time_s)

    def stop(self) -> None:
        """Cancel what is in flight, and wait until the engine has let go of it."""
        for call in [call for completion in self.in_flight for call in completion.calls]:
            gone = threading.Event()
            self._engine.cancel(call.task, gone.set)
            gone.wait()
        self.in_flight.clear()

    def _hear(self, call: _Call, produced: Sequence[Scored] | None) -> tuple[int, bool]:
        """How many tokens became final, and whether the completion ended."""
        completion, task = call.completion, call.task
        loop = completion.loop
        if call not in completion.calls:
            return 0, False  # Cancelled while its answer was on its way.
        if produced is not None:
            if isinstance(call.command, Decode):
                assert loop is not None
                self._decoded(completion, loop, produced)
            return (0 if isinstance(call.command, Draft) else len(produced)), False
        completion.calls.remove(call)
        if loop is None:
            return 0, True
        tokens = 0
        if isinstance(call.command, Decode):
            assert isinstance(task, DecodeTask)
            self._decoded(completion, loop, (), None if task.yielded else task.finish or "length")
        elif isinstance(task, DecodeTask):
            loop.on_draft([token.id for token in task.produced])
        else:
            commit = loop.on_verdict(self._verdict(task))
            tokens = len(commit.tokens)
            completion.counts = commit.counts
        self._follow(completion, loop)
        return tokens, loop.finish is not None

    def _decoded(
        self, completion: Completion, loop: Loop, tokens: Sequence[Scored], finish: Finish | None = None
    ) -> None:
        stand = tuple(Token(token.id, token.logprob) for token in tokens)
        yields = not tokens and finish is None
        commit = loop.on_decoded(Decoded(stand, finish, yields, self._verifier.fingerprint))
        if commit is not None:
            completion.counts = commit.counts

    def _verdict(self, task: VerifyTask) -> Verdict:
        tokens = tuple(Token(token.id, token.logprob) for token in task.produced)
        advice = (task.wants_draft, False) if self._way.adaptive else (True, self._way.ahead)
        return Verdict(task.agreed, tokens, task.finish, self._verifier.fingerprint, *advice)

    def _follow(self, completion: Completion, loop: Loop) -> None:
        """Let the calls in the engine be those that are pending."""
        sampling = self._way.sampling
        for call in [call for call in completion.calls if not any(call.command is kept for kept in loop.pending)]:
            completion.calls.remove(call)
            self._engine.cancel(call.task)
        for command in loop.pending:
            if any(call.command is command for call in completion.calls):
                continue
            match command:
                case Draft(context=context, count=count):
                    task: Task = DecodeTask(list(context), count, sampling, frozenset(), 0, is_draft=True)
                case Verify(context=context, draft=draft):
                    task = VerifyTask(list(context), list(draft), sampling, frozenset(), 0)
                case Decode():
                    task = DecodeTask(
                        list(command.context),
                        command.count,
                        sampling,
                        frozenset(),
                        0,
                        is_draft=False,
                        batching="invariant",
                        yields=command.yields,
                    )
            self._submit(completion, command, task)

    def _submit(self, completion: Completion, command: Command | None, task: Task) -> None:
        call = _Call(self._events, completion, command, task)
        completion.calls.append(call)
        self._engine.submit(task, call)


def numbered(prompts: Prompts, first: int, length: int) -> Iterator[list[int]]:
    """Prompts number first, first + 1, ... of `length` tokens, without end."""
    number = first
    while True:
        yield prompts.of_length(number, length)
        number += 1
