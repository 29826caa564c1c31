"""From an order to events: admission, the plan, then text from committed tokens.

Owns the order of these steps and the choice of the loop that runs a job. Knows neither HTTP nor OpenAI's JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from backend.protocol import Batching, Info, Role
from gateway.admission import Admission
from gateway.domain import (
    ChoiceDeltas,
    ChoiceEvent,
    ChoiceFinished,
    Commit,
    Completion,
    Counts,
    Finish,
    Finished,
    Job,
    Order,
)
from gateway.driver import Progress, WindowBackend, run_fast, run_verified
from gateway.dvr import Verifier
from gateway.errors import BackendRefused, ModelNotFound, RequestError
from gateway.merge import merge
from gateway.planning import Planner
from gateway.prompt_tokens import PromptTokens
from gateway.text import ModelText
from policies.policy import Mode, Policy

BATCHING: dict[Mode, Batching] = {
    Mode.OFF: "dynamic",
    Mode.BATCH_INVARIANT: "invariant",
    Mode.BATCH_OF_ONE: "none",
}
"""How the backend batches what no verifier sees."""

GRAMMAR = "sampling.grammar"
"""The window protocol's name of what an answer must look like."""


@dataclass(frozen=True, slots=True)
class Run:
    """A completion under way, and the text side of its model."""

    completion: Completion
    text: ModelText
    events: AsyncGenerator[ChoiceEvent]


class Backends(Protocol):
    """What a service needs of those that serve its model."""

    @property
    def roles(self) -> Collection[Role]:
        """What they can do for the model: generate without a guarantee ("draft"), or verify."""
        ...

    @property
    def drafts(self) -> bool:
        """Whether somebody drafts for those who verify."""
        ...

    def session(self) -> WindowBackend:
        """The backend of one completion."""
        ...


class Service:
    """One model. `draw_seed` gives the seed of a request to which the policy assigns none."""

    def __init__(
        self,
        backends: Backends,
        info: Info,
        text: ModelText,
        policy: Policy,
        admission: Admission,
        draw_seed: Callable[[], int],
    ) -> None:
        self._backends = backends
        self.tokens = PromptTokens(info, text)
        self._planner = Planner(info, text, self.tokens, policy, draw_seed, lambda: backends.roles)
        self._verifier = Verifier(info.fingerprint, info.vocab_size)
        self.info = info
        self.text = text
        self.admission = admission

    def __repr__(self) -> str:
        return f"<Service {self.info.model} {self.info.fingerprint} {self.admission!r}>"

    def check_model(self, model: str) -> None:
        """Raise `ModelNotFound` unless `model` is the one served."""
        if model != self.info.model:
            raise ModelNotFound(
                f"the model {model!r} does not exist; this gateway serves {self.info.model!r}", param="model"
            )

    @asynccontextmanager
    async def open(self, order: Order) -> AsyncIterator[Run]:
        """Hold a place for the order and run it; leaving the context cancels what is under way."""
        self.check_model(order.model)
        if order.places > self.admission.capacity:
            raise RequestError(
                f"{order.places} completions are asked for at once; this gateway generates {self.admission.capacity}"
                " at a time",
                param="prompt" if len(order.prompts) > 1 else "n",
            )
        async with self.admission.admit(order.places):
            completion = await self._planner.plan(order)
            choices = [self._choice(completion, index) for index in range(len(completion.jobs))]
            async with aclosing(choices[0] if len(choices) == 1 else merge(choices)) as events:
                try:
                    yield Run(completion, self.text, events)
                except BackendRefused as error:
                    if error.field != GRAMMAR:
                        raise
                    field = order.grammar_field
                    raise RequestError(error.message.replace(GRAMMAR, field, 1), param=field) from error

    async def _choice(self, completion: Completion, index: int) -> AsyncGenerator[ChoiceEvent]:
        text = self.text.output(completion.stops, continues=completion.continues, spelled=completion.spelled)
        counts = Counts()
        finish: Finish = "length"
        async with aclosing(self._progress(completion, completion.jobs[index])) as progress:
            async for step in progress:
                match step:
                    case Commit():
                        counts = step.counts
                        deltas = text.push(step.tokens)
                        if text.stopped:
                            finish = "stop"
                        yield ChoiceDeltas(index, deltas)
                        if text.stopped:
                            break
                    case Finished():
                        finish = step.finish
        if last := text.finish():
            yield ChoiceDeltas(index, last)
        yield ChoiceFinished(index, finish, text.consumed, counts)

    def _progress(self, completion: Completion, job: Job) -> AsyncGenerator[Progress]:
        if completion.mode is Mode.VERIFIED:
            session, drafts = self._backends.session(), self._backends.drafts
            return run_verified(session, job, completion.windows, self._verifier, drafts=drafts)
        return run_fast(self._backends.session(), job, self._verifier.vocab_size, BATCHING[completion.mode])
