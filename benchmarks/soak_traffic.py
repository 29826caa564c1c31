"""Mixed traffic on one engine, drawn from a seed: what the soak lives on.

Clients, each a thread, ask one thing after the other: a verified answer from a pool of requests, an unverified stream,
or a stray call of the window protocol with a context that others share. Verified answers are drafted, drafted wrongly,
or decoded by the verifier, call by call as it comes. Calls are cancelled in the middle, and verified
ones then asked again, as a gateway does. Requests share prefixes of many lengths; some are penalised or biased, some
have to be of a grammar.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask, Task, VerifyTask
from backend.protocol import Grammar, Sampling, TokenizerFiles
from benchmarks import drive
from benchmarks.drive import Call, Request, bits, complete
from benchmarks.grammars import Constraining, Grammars, TakesCalls
from benchmarks.waiting import Ending

_WAYS = ("drafted", "drafted", "poisoned", "invented", "decoded", "decoded")
"""How a verified answer goes on: see the module's description."""
_LONGEST_WAIT_S = 0.2  # Before a call is cancelled.
_PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 12},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 4},
            "kind": {"enum": ["guest", "host", None]},
        },
        "required": ["name", "ages", "kind"],
        "additionalProperties": False,
    }
)
_GRAMMARS = (
    Grammar("json_schema", _PERSON),
    Grammar("json_schema", '{"type":"object"}'),
    Grammar("regex", "((the|an?|in) [a-z]{2,9}[,;.] ?){2,12}(yes|no)"),
)


@dataclass(frozen=True, slots=True)
class Mix:
    """How much of what. `blocks` is all the KV there is, tight enough that clients take it from each other."""

    seed: int = 0
    requests: int = 200
    clients: int = 16
    blocks: int = 28
    longest_prefix: int = 200
    longest_answer: int = 64


def draw_requests(mix: Mix, vocab_size: int, ends: frozenset[int]) -> list[Request]:
    """The pool that verified answers are asked from; those with a grammar stop at any of `ends`."""
    rng = random.Random(mix.seed)
    bases = [[rng.randrange(vocab_size) for _ in range(mix.longest_prefix)] for _ in range(4)]

    def request() -> Request:
        length = rng.choice([0, 1, 63, 64, 65, 128, rng.randrange(mix.longest_prefix + 1)])
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))]
        prompt = (*rng.choice(bases)[: min(length, mix.longest_prefix)], *own)
        stop_ids = frozenset(rng.sample(range(vocab_size), k=rng.choice([0, 0, 5])))
        sampling = _sampling(rng, vocab_size)
        if sampling.grammar is not None:
            stop_ids |= ends
        return Request(prompt, rng.randint(1, mix.longest_answer), sampling, stop_ids, rng.choice([0, 0, 5]))

    return [request() for _ in range(mix.requests)]


def _sampling(rng: random.Random, vocab_size: int) -> Sampling:
    filters: dict[str, Any] = rng.choice(
        [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95}]
    )
    adjusts: dict[str, Any] = rng.choice(
        [
            {},
            {},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5},
            {"frequency_penalty": 0.7, "min_tokens": 5},
            {"logit_bias": ((rng.randrange(vocab_size), 5.0),)},
        ]
    )
    temperature = rng.choice([0.0, 0.0, 0.7, 1.0, 1.3])
    grammar = rng.choice([None, None, None, *_GRAMMARS])
    return Sampling(temperature=temperature, seed=rng.getrandbits(63), grammar=grammar, **filters, **adjusts)


class SoakTraffic:
    """Clients on an engine that is running. `answers` holds, for each request's index, how often which bits came."""

    def __init__(self, engine: Engine, mix: Mix, tokenizer: TokenizerFiles):
        grammars = Grammars(tokenizer, engine.info.vocab_size)
        self._engine = Constraining(engine, grammars)
        self._vocab_size = engine.info.vocab_size
        self._ends = grammars.ends
        self._mix = mix
        self.requests = draw_requests(mix, self._vocab_size, self._ends)
        self.answers: dict[int, Counter[bytes]] = {}
        self.tokens = 0
        """Verified tokens in all answers."""
        self.did: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, enough: Callable[[int], bool]) -> None:
        """Keep the clients busy until `enough` says so of the number of verified answers. Raises what a call raised."""
        over = threading.Event()

        def client(number: int) -> None:
            rng = random.Random(f"{self._mix.seed} {number}")
            try:
                while not over.is_set() and not enough(self._answered):
                    self._act(rng)
            finally:
                over.set()  # Where one fails, the others need not go on.

        with ThreadPoolExecutor(self._mix.clients) as threads:
            for done in [threads.submit(client, number) for number in range(self._mix.clients)]:
                done.result()

    @property
    def _answered(self) -> int:
        return self.did["answers"]

    def _act(self, rng: random.Random) -> None:
        what = rng.random()
        if what < 0.6:
            self._ask(rng)
        else:
            self._make_company(rng, streams=what < 0.85)

    def _ask(self, rng: random.Random) -> None:
        index = rng.randrange(len(self.requests))
        request = self.requests[index]

        def propose(context: list[int], generated: int) -> Call:
            way = rng.choice(_WAYS)
            self._note(way)
            if way == "decoded":
                count, yields = rng.randint(1, request.count - generated), rng.random() < 0.5
                return lambda: DecodeTask(
                    context,
                    count,
                    request.sampling,
                    request.stop_ids,
                    request.top,
                    is_draft=False,
                    generated=generated,
                    batching="invariant",
                    yields=yields,
                )
            draft: list[int] = []
            if way == "invented":
                draft = [rng.randrange(self._vocab_size) for _ in range(rng.randint(1, 40))]
            else:
                count = rng.choice([1, 3, 7, 15, 31, 63])
                draft = drive.draft(self._engine, request, context, generated, count)
            if way == "poisoned":
                draft[rng.randrange(len(draft))] = rng.randrange(self._vocab_size)
            return drive.verify(request, context, generated, draft)

        def insist(engine: TakesCalls, call: Call) -> Task:
            while rng.random() < 0.1:
                self._perform_in_part(call(), rng)
            task = call()
            drive.perform(engine, task)
            return task

        answer = complete(self._engine, request, propose, insist)
        with self._lock:
            self.did["answers"] += 1
            self.did["answers of a grammar"] += request.sampling.grammar is not None
            self.tokens += len(answer)
            self.answers.setdefault(index, Counter())[bits(answer)] += 1

    def _make_company(self, rng: random.Random, streams: bool) -> None:
        prompt = list(rng.choice(self.requests).prompt)
        context = [*prompt[: rng.randint(1, len(prompt))], rng.randrange(self._vocab_size)]
        sampling = _sampling(rng, self._vocab_size)
        stop_ids = frozenset[int]() if sampling.grammar is None else self._ends
        if streams:
            self._note("streams")
            task: Task = DecodeTask(
                context, rng.randint(1, 200), sampling, stop_ids, rng.choice([0, 5]), is_draft=False
            )
        else:
            self._note("stray calls")
            draft = [rng.randrange(self._vocab_size) for _ in range(rng.randint(0, 90))]
            task = VerifyTask(context, draft, sampling, stop_ids, top=0)
        if rng.random() < 0.4:
            self._perform_in_part(task, rng)
        else:
            drive.perform(self._engine, task)

    def _perform_in_part(self, task: Task, rng: random.Random) -> None:
        """Run a task, and cancel it after a while if it is not over by then."""
        ends: SimpleQueue[Exception | None] = SimpleQueue()
        self._engine.submit(task, Ending(ends.put))
        try:
            error = ends.get(timeout=rng.uniform(0, _LONGEST_WAIT_S))
        except Empty:
            gone = threading.Event()
            self._engine.cancel(task, gone.set)
            gone.wait()
            self._note("cancellations")
        else:
            if error is not None:
                raise error

    def _note(self, what: str) -> None:
        with self._lock:
            self.did[what] += 1
