"""A closed loop of completions straight on an engine: a share of them verified, the others in mode off.

Drives verified ones with the gateway's own state machine (gateway.dvr), without HTTP in between. Whenever one ends, the
next begins, so that the number in flight is constant; the first ones are of different lengths, so that they do not end
together. Tokens count when they are final: when decoded in mode off, when committed in mode verified.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import Sampling
from benchmarks.prompts import Prompts
from gateway.domain import Counts, Finished, Job, Token
from gateway.dvr import Draft, Loop, Verdict, Verifier, Verify


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine. Of requests number 0, 1, 2... the `share` that is verified is spread evenly.

    `adaptive` follows the engine's advice on whether to draft; otherwise every window is drafted.
    """

    share: float
    in_flight: int
    new_tokens: int
    windows: tuple[int, ...]
    sampling: Sampling
    adaptive: bool


@dataclass(slots=True)
class Tally:
    """What came out within the measured interval; `counts` are those of the verified completions that ended in it."""

    tokens: int = 0
    verified_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    completions: int = 0
    verified_completions: int = 0
    counts: Counts = field(default_factory=Counts)


class _Completion:
    """One request on its way. Also the listener of its task; what it hears goes to the queue of the loop."""

    def __init__(self, events: SimpleQueue[tuple[_Completion, int | Exception | None]], loop: Loop | None):
        self._events = events
        self.loop = loop
        self.task: Task | None = None

    def produced(self, tokens: Sequence[Scored]) -> None:
        self._events.put((self, len(tokens)))

    def ended(self) -> None:
        self._events.put((self, None))

    def failed(self, error: Exception) -> None:
        self._events.put((self, error))


class ClosedLoop:
    """Runs one load on one engine."""

    def __init__(self, engine: Engine, prompts: Iterator[list[int]], load: Load):
        self._engine = engine
        self._prompts = prompts
        self._load = load
        self._verifier = Verifier(engine.info.fingerprint, engine.info.vocab_size)
        self._events: SimpleQueue[tuple[_Completion, int | Exception | None]] = SimpleQueue()
        self._running: list[_Completion] = []
        self._begun = 0

    def run(self, warm_up_s: float, measured_s: float) -> Tally:
        """Keep the load up for a while; what is in flight at the end is cancelled."""
        for slot in range(self._load.in_flight):
            self._begin(max(2, self._load.new_tokens * (slot + 1) // self._load.in_flight))
        tally, start, start_cpu = Tally(), 0.0, 0.0
        begin = time.perf_counter()
        while True:
            completion, news = self._events.get()
            if isinstance(news, Exception):
                raise news
            self._hear(completion, news, tally)
            now = time.perf_counter()
            if not start and now >= begin + warm_up_s:
                tally, start, start_cpu = Tally(), now, time.process_time()
            if start and now >= start + measured_s:
                break
        tally.wall_s, tally.cpu_s = now - start, time.process_time() - start_cpu
        for completion in self._running:
            assert completion.task is not None
            self._engine.cancel(completion.task)
        return tally

    def _begin(self, count: int) -> None:
        number, share, prompt = self._begun, self._load.share, next(self._prompts)
        self._begun += 1
        verified = int((number + 1) * share) > int(number * share)
        if verified:
            job = Job(tuple(prompt), self._load.sampling, count, (), top_logprobs=0)
            completion = _Completion(self._events, Loop(job, self._load.windows, self._verifier))
            assert completion.loop is not None
            self._obey(completion, completion.loop.start())
        else:
            completion = _Completion(self._events, None)
            self._submit(completion, DecodeTask(prompt, count, self._load.sampling, frozenset(), 0, is_draft=False))
        self._running.append(completion)

    def _hear(self, completion: _Completion, news: int | None, tally: Tally) -> None:
        loop, task = completion.loop, completion.task
        if news is not None:
            tally.tokens += news if loop is None else 0
            return
        if loop is None:
            tally.completions += 1
            self._replace(completion)
        elif isinstance(task, DecodeTask):
            self._obey(completion, loop.on_draft([token.id for token in task.produced]))
        elif isinstance(task, VerifyTask):
            tokens = tuple(Token(token.id, token.logprob) for token in task.produced)
            wants_draft = task.wants_draft or not self._load.adaptive
            verdict = Verdict(task.agreed, tokens, task.finish, self._verifier.fingerprint, wants_draft)
            commit, command = loop.on_verdict(verdict)
            tally.tokens += len(tokens)
            tally.verified_tokens += len(tokens)
            if isinstance(command, Finished):
                tally.completions += 1
                tally.verified_completions += 1
                tally.counts += commit.counts
                self._replace(completion)
            else:
                self._obey(completion, command)

    def _replace(self, completion: _Completion) -> None:
        self._running.remove(completion)
        self._begin(self._load.new_tokens)

    def _obey(self, completion: _Completion, command: Draft | Verify | Finished) -> None:
        match command:
            case Draft(context=context, count=count):
                task: Task = DecodeTask(list(context), count, self._load.sampling, frozenset(), 0, is_draft=True)
            case Verify(context=context, draft=draft, extend=extend):
                task = VerifyTask(list(context), list(draft), extend, self._load.sampling, frozenset(), 0)
            case Finished():
                raise AssertionError("a completion does not end before its first token")
        self._submit(completion, task)

    def _submit(self, completion: _Completion, task: Task) -> None:
        completion.task = task
        self._engine.submit(task, completion)


def numbered(prompts: Prompts, first: int) -> Iterator[list[int]]:
    """Prompts number first, first + 1, ... without end."""
    number = first
    while True:
        yield prompts[number]
        number += 1
