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
    Caller,
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
from gateway.errors import BackendRefused, RequestError
from gateway.limits.limiter import Grant, Limiter
from gateway.merge import merge
from gateway.planning import Planner
from gateway.prompt_tokens import PromptTokens
from gateway.text import ModelText
from policies.decision import Limits
from policies.policy import Decision, Mode, requests_limit

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
    """A completion under way, why it runs as it does and under which version of the policy, and its model's text."""

    completion: Completion
    decision: Decision
    policy_version: str
    grant: Grant
    text: ModelText
    events: AsyncGenerator[ChoiceEvent]


class Backends(Protocol):
    """What a service needs of those that serve its model."""

    @property
    def roles(self) -> Collection[Role]:
        """What they can do for the model: generate without a guarantee ("draft"), or verify."""
        ...

    @property
    def verifying(self) -> Collection[Role]:
        """What they can do at the moment for verified completions."""
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
        admission: Admission,
        limiter: Limiter,
        draw_seed: Callable[[], int],
    ) -> None:
        self._backends = backends
        self.tokens = PromptTokens(info, text)
        self._planner = Planner(info, text, self.tokens, draw_seed, lambda: backends.roles)
        self._verifier = Verifier(info.fingerprint, info.vocab_size)
        self.info = info
        self.text = text
        self.admission = admission
        self._limiter = limiter

    def __repr__(self) -> str:
        return f"<Service {self.info.model} {self.info.fingerprint} {self.admission!r}>"

    @asynccontextmanager
    async def open(self, order: Order, caller: Caller) -> AsyncIterator[Run]:
        """Hold what the order needs and run it; leaving the context cancels what is under way and gives all back."""
        decision = self._planner.decide(order, caller)
        limits = decision.limits
        self._check_places(order, limits)
        async with (
            self.admission.admit(order.places, caller.tenant, limits.queue_share),
            self._limiter.admit(caller.tenant, limits, order.places, caller.policy.limits_unavailable) as grant,
        ):
            completion = await self._planner.plan(order, decision)
            await grant.take_tokens(completion.prompt_tokens, sum(job.max_tokens for job in completion.jobs))
            choices = [self._choice(completion, index, grant) for index in range(len(completion.jobs))]
            async with aclosing(choices[0] if len(choices) == 1 else merge(choices)) as events:
                try:
                    yield Run(completion, decision, caller.policy.version, grant, self.text, events)
                except BackendRefused as error:
                    if error.field != GRAMMAR:
                        raise
                    field = order.grammar_field
                    raise RequestError(error.message.replace(GRAMMAR, field, 1), param=field) from error

    @asynccontextmanager
    async def count(self, caller: Caller) -> AsyncIterator[None]:
        """Count a request that generates nothing."""
        requests = requests_limit(caller.policy, caller.tenant, self.info.model)
        limits = Limits(requests=requests)
        async with self._limiter.admit(caller.tenant, limits, 0, caller.policy.limits_unavailable):
            yield

    def _check_places(self, order: Order, limits: Limits) -> None:
        """Refuse what would never fit, however long its client waits."""
        most = self.admission.places_for(limits.queue_share)
        if limits.concurrency is not None:
            most = min(most, limits.concurrency.count)
        if order.places > most:
            raise RequestError(
                f"{order.places} completions are asked for at once; this gateway generates {most} at a time",
                param="prompt" if len(order.prompts) > 1 else "n",
            )

    async def _choice(self, completion: Completion, index: int, grant: Grant) -> AsyncGenerator[ChoiceEvent]:
        text = self.text.output(completion.stops, continues=completion.continues, spelled=completion.spelled)
        counts = Counts()
        finish: Finish = "length"
        async with aclosing(self._progress(completion, completion.jobs[index])) as progress:
            async for step in progress:
                match step:
                    case Commit():
                        counts = step.counts
                        grant.use(len(step.tokens))
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
            session, roles = self._backends.session(), self._backends.verifying
            return run_verified(session, job, completion.windows, self._verifier, roles)
        return run_fast(self._backends.session(), job, self._verifier.vocab_size, BATCHING[completion.mode])
