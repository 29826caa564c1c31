"""From an order to events: admission, the policy's decision, the prompt's tokens, then text from committed tokens.

Owns the order of these steps and the checks that need the model (its name, its context, its roles). Knows neither HTTP
nor OpenAI's JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from backend.protocol import Info
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
    Message,
    Order,
    choice_seed,
)
from gateway.driver import Progress, WindowBackend, run_fast, run_verified
from gateway.dvr import Verifier
from gateway.errors import ContextExceeded, ModelNotFound, RequestError, RoleRefused
from gateway.merge import merge
from gateway.text import ModelText
from policies.policy import Decision, Mode, Policy, PolicyError, resolve

INLINE_CHARS = 16_384
"""Prompts up to this long are tokenised on the event loop, in under about 10 ms; longer ones in a thread."""

MESSAGE_CHARS = 64
"""What a message weighs beside its own words: an empty one is rendered too."""


@dataclass(frozen=True, slots=True)
class Run:
    """A completion under way."""

    completion: Completion
    events: AsyncGenerator[ChoiceEvent]


class Service:
    """One model behind one backend. `draw_seed` gives the seed of a request to which the policy assigns none."""

    def __init__(
        self,
        backend: WindowBackend,
        info: Info,
        text: ModelText,
        policy: Policy,
        admission: Admission,
        draw_seed: Callable[[], int],
    ) -> None:
        self._backend = backend
        self._text = text
        self._policy = policy
        self._draw_seed = draw_seed
        self._verifier = Verifier(info.fingerprint, info.vocab_size)
        self.info = info
        self.admission = admission

    def __repr__(self) -> str:
        return f"<Service {self.info.model} {self.info.fingerprint} {self.admission!r}>"

    def check_model(self, model: str) -> None:
        """Raise `ModelNotFound` unless `model` is the one served."""
        if model != self.info.model:
            raise ModelNotFound(
                f"the model {model!r} does not exist; this gateway serves {self.info.model!r}", param="model"
            )

    def token_name(self, id_: int) -> bytes:
        return self._text.token_name(id_)

    @asynccontextmanager
    async def open(self, order: Order) -> AsyncIterator[Run]:
        """Hold a place for the order and run it; leaving the context cancels what is under way."""
        async with self.admission.admit(order.choices):
            completion = await self._plan(order)
            choices = [self._choice(completion, index) for index in range(len(completion.jobs))]
            async with aclosing(choices[0] if len(choices) == 1 else merge(choices)) as events:
                yield Run(completion, events)

    async def _plan(self, order: Order) -> Completion:
        self.check_model(order.model)
        self._check_ids([id_ for id_, _ in order.sampling.logit_bias], "logit_bias")
        self._check_ids(order.stop_ids, "stop_token_ids")
        decision = self._decide(order)
        seed = self._draw_seed() if decision.seed is None else decision.seed
        prompt = await self._encode(order.messages)
        max_tokens = self._room(len(prompt), order)
        if order.sampling.min_tokens > max_tokens:
            raise RequestError(f"min_tokens must be at most the {max_tokens} to generate", param="min_tokens")
        eos_ids = () if order.ignore_eos else self._text.eos_ids
        stop_ids = (*eos_ids, *(id_ for id_ in order.stop_ids if id_ not in eos_ids))
        jobs = tuple(
            Job(
                prompt=prompt,
                sampling=msgspec.structs.replace(order.sampling, seed=choice_seed(seed, index)),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                top_logprobs=order.top_logprobs,
            )
            for index in range(order.choices)
        )
        return Completion(
            model=order.model,
            mode=decision.mode,
            fingerprint=self.info.fingerprint,
            jobs=jobs,
            stops=order.stops,
            windows=decision.windows,
        )

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        if ids and max(ids) >= self.info.vocab_size:
            raise RequestError(
                f"{field} holds token id {max(ids)}; the vocabulary has {self.info.vocab_size}", param=field
            )

    def _decide(self, order: Order) -> Decision:
        try:
            decision = resolve(self._policy, order.facts, max_draft=self.info.verify.window - 1)
        except PolicyError as error:
            raise RequestError(str(error), param=error.field) from error
        role = "verify" if decision.mode is Mode.VERIFIED else "draft"
        if role not in self.info.roles:
            raise RoleRefused(f"mode {decision.mode} was asked for, and the backend does not {role}")
        return decision

    async def _encode(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        chars = sum(MESSAGE_CHARS + len(message.content) + len(message.name or "") for message in messages)
        if chars <= INLINE_CHARS:
            return self._prompt(messages)
        return await asyncio.to_thread(self._prompt, messages)

    def _prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        text = self._text.render_chat(
            [
                {"role": message.role, "content": message.content}
                | ({} if message.name is None else {"name": message.name})
                for message in messages
            ]
        )
        # Nobody waits for the tokens of a prompt that cannot fit.
        if (least := self._text.least_tokens(text)) >= self.info.max_context:
            raise self._too_long(f"at least {least}")
        prompt = self._text.encode(text)
        if len(prompt) >= self.info.max_context:
            raise self._too_long(str(len(prompt)))
        return prompt

    def _too_long(self, tokens: str) -> ContextExceeded:
        return ContextExceeded(
            f"this model's maximum context length is {self.info.max_context} tokens, but the messages make {tokens}"
            " tokens",
            param="messages",
        )

    def _room(self, prompt: int, order: Order) -> int:
        """How many tokens may be generated behind a prompt that fits."""
        limit, asked = self.info.max_context, order.max_tokens
        if asked is None:
            return limit - prompt
        if prompt + asked > limit:
            raise ContextExceeded(
                f"this model's maximum context length is {limit} tokens, but {prompt + asked} were asked for"
                f" ({prompt} in the messages, {asked} in the completion)",
                param=order.max_tokens_field,
            )
        return asked

    async def _choice(self, completion: Completion, index: int) -> AsyncGenerator[ChoiceEvent]:
        text = self._text.output(completion.stops)
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
            drafts = "draft" in self.info.roles
            return run_verified(self._backend, job, completion.windows, self._verifier, drafts=drafts)
        return run_fast(self._backend, job, self._verifier.vocab_size)
