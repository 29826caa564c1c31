"""From an order to events: admission, the plan, then text from committed tokens.

Owns the order of these steps and the choice of the loop that runs a job. Knows neither HTTP nor OpenAI's JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from backend.protocol import Batching, Info, Role
from gateway.admission import Admission
from gateway.commit_log.commit_log import CommitLog, Source
from gateway.commit_log.flight import Keeping
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
    Progress,
    Token,
)
from gateway.driver import WindowBackend, run_fast, run_verified
from gateway.dvr import Verifier
from gateway.errors import BackendRefused, RequestError
from gateway.limits.limiter import Grant, Limiter
from gateway.merge import merge
from gateway.planning import Planner
from gateway.prompt_tokens import PromptTokens
from gateway.telemetry.record import recording
from gateway.telemetry.work import Work
from gateway.text.model_text import ModelText
from gateway.text.output_text import OutputText
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


CacheStatus: TypeAlias = Source | Literal["off"]
"""What the commit log did for an answer; of several choices, for the one it did least for."""


@dataclass(frozen=True, slots=True)
class Run:
    """A completion under way, why it runs as it does and under which version of the policy, and its model's text."""

    completion: Completion
    cache: CacheStatus
    decision: Decision
    policy_version: str
    grant: Grant
    text: ModelText
    events: AsyncGenerator[ChoiceEvent]


class Session(WindowBackend, Protocol):
    """The backend of one completion."""

    def quarantine(self) -> bool:
        """Ask those no more whose verified tokens came last; whether others are left to ask."""
        ...


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

    def session(self) -> Session:
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
        commit_log: CommitLog,
        draw_seed: Callable[[], int],
    ) -> None:
        self._backends = backends
        self._commit_log = commit_log
        self.tokens = PromptTokens(info, text)
        self._planner = Planner(info, text, self.tokens, draw_seed, lambda: backends.roles)
        self._verifier = Verifier(info.fingerprint, info.vocab_size)
        self.info = info
        self.text = text
        self.admission = admission
        self.work = Work()
        self._limiter = limiter

    def __repr__(self) -> str:
        return f"<Service {self.info.model} {self.info.fingerprint} {self.admission!r}>"

    @asynccontextmanager
    async def open(self, order: Order, caller: Caller, *, in_pieces: bool) -> AsyncIterator[Run]:
        """Hold what the order needs and run it; leaving the context cancels what is under way and gives all back.

        Unless it is wanted `in_pieces`, deltas that could be shown one by one may come as one.
        """
        record = recording()
        record.model, record.via = self.info.model, "backend"
        with record.span.child("policy") as span:
            decision = self._planner.decide(order, caller)
            span.set({"verbatim.rule": decision.rule, "verbatim.policy": caller.policy.version})
        record.mode = decision.mode
        limits = decision.limits
        self.admission.check(order.places, limits, "prompt" if len(order.prompts) > 1 else "n")
        async with (
            self.admission.admit(order.places, caller.tenant, limits.queue_share),
            self._limiter.admit(caller.tenant, limits, order.places, caller.policy.limits_unavailable) as grant,
            AsyncExitStack() as readings,
        ):
            completion = await self._planner.plan(order, decision)
            record.prompt_tokens = completion.prompt_tokens
            if record.span.recording:
                record.span.set(_attributes(order, completion))
            await grant.take_tokens(completion.prompt_tokens, sum(job.max_tokens for job in completion.jobs))
            try:
                sources = [
                    await readings.enter_async_context(self._read(completion, job, decision)) for job in completion.jobs
                ]
                cache = min((source.status for source in sources), key=_STATUSES.index)
                record.cache = cache
                texts = [self._output(completion, joins=not in_pieces) for _ in sources]
                choices = [
                    self._choice(index, text, source.progress, grant)
                    for index, (text, source) in enumerate(zip(texts, sources, strict=True))
                ]
                async with aclosing(choices[0] if len(choices) == 1 else merge(choices)) as events:
                    yield Run(completion, cache, decision, caller.policy.version, grant, self.text, events)
            except BackendRefused as error:
                if error.field != GRAMMAR:
                    raise
                field = order.grammar_field
                raise RequestError(error.message.replace(GRAMMAR, field, 1), param=field) from error

    async def foresee(self, order: Order, caller: Caller) -> tuple[Completion, Decision]:
        """What would be run for an order; raises `RequestError` or `RoleRefused`, as `open` does."""
        decision = self._planner.decide(order, caller)
        return await self._planner.plan(order, decision), decision

    @asynccontextmanager
    async def count(self, caller: Caller) -> AsyncIterator[None]:
        """Count a request that generates nothing."""
        requests = requests_limit(caller.policy, caller.tenant, self.info.model)
        limits = Limits(requests=requests)
        async with self._limiter.admit(caller.tenant, limits, 0, caller.policy.limits_unavailable):
            yield

    @asynccontextmanager
    async def _read(self, completion: Completion, job: Job, decision: Decision) -> AsyncIterator[_Source]:
        """Where the tokens of a job come from."""
        cache = decision.cache
        if completion.mode is not Mode.VERIFIED:
            session, batching = self._backends.session(), BATCHING[completion.mode]
            yield _Source("off", run_fast(session, job, self._verifier.vocab_size, batching))
            return
        verified = _Verified(self._backends, completion.windows, self._verifier, self.work)
        if cache is None:
            yield _Source("off", verified.generate(job, (), ()))
            return
        keeping = Keeping(cache.read, cache.write, cache.ttl_s, cache.max_tokens)

        def wanted(tokens: Sequence[Token]) -> int:
            if not completion.stops:
                return job.max_tokens
            text = self._output(completion, joins=False)
            text.push(tuple(tokens[: job.max_tokens]))
            return text.consumed if text.stopped else job.max_tokens

        log, fingerprint = self._commit_log, completion.fingerprint
        async with AsyncExitStack() as stack:
            with recording().span.child("log") as span:
                reading = await stack.enter_async_context(
                    log.open(cache.tenant, fingerprint, job, keeping, verified, wanted)
                )
                span.set({"verbatim.cache": reading.source})
            try:
                yield _Source(reading.source, reading.progress())
            finally:
                self.work.recalled(reading.recalled)

    def _output(self, completion: Completion, *, joins: bool) -> OutputText:
        return self.text.output(
            completion.stops, continues=completion.continues, spelled=completion.spelled, joins=joins
        )

    async def _choice(
        self, index: int, text: OutputText, progress: AsyncGenerator[Progress], grant: Grant
    ) -> AsyncGenerator[ChoiceEvent]:
        record = recording()
        counts = Counts()
        finish: Finish = "length"
        async with aclosing(progress):
            async for step in progress:
                match step:
                    case Commit():
                        record.came()
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
        record.finish_choice(text.consumed)
        yield ChoiceFinished(index, finish, text.consumed, counts)


_STATUSES: tuple[CacheStatus, ...] = ("off", "lead", "follow", "hit")


def _attributes(order: Order, completion: Completion) -> dict[str, str | int | float]:
    """What a request asks for, in the words of OpenTelemetry's conventions."""
    sampling = completion.jobs[0].sampling
    return {
        "gen_ai.request.max_tokens": completion.jobs[0].max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": order.places,
        "verbatim.fingerprint": completion.fingerprint,
    }


@dataclass(frozen=True, slots=True)
class _Source:
    """The tokens of one job, and what the commit log has to do with them."""

    status: CacheStatus
    progress: AsyncGenerator[Progress]


class _Verified:
    """Has the backends generate verified tokens of one job."""

    def __init__(self, backends: Backends, windows: Sequence[int], verifier: Verifier, work: Work) -> None:
        self._backends = backends
        self._windows = windows
        self._verifier = verifier
        self._work = work
        self._session = backends.session()

    def generate(self, job: Job, committed: Sequence[int], recorded: Sequence[int]) -> AsyncGenerator[Progress]:
        """What the verifier says comes behind `committed`."""
        roles = self._backends.verifying
        return run_verified(self._session, job, self._windows, self._verifier, roles, committed, recorded, self._work)

    def quarantine(self) -> bool:
        """Ask those no more who verified last; whether others are left."""
        return self._session.quarantine()
