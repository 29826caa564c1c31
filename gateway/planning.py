"""From an order to a completion: the policy's decision, the prompts' tokens, a job for each choice.

Owns the checks that need the model: its roles and its context. Prompts of every kind have become token ids here, and
from then on nothing asks where they came from: the same ids, sampling and seed give the same tokens.

Every prompt of a list is planned as it would be alone: its choices have the seeds they would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from backend.protocol import Info, Role, Sampling
from gateway import errors
from gateway.deciding import decide
from gateway.domain import Caller, ChatPrompt, Completion, Job, Order, Prompt, choice_seed
from gateway.errors import ContextExceeded, RequestError, RoleRefused
from gateway.prompt_tokens import PromptTokens, field_of
from gateway.text.model_text import ModelText
from policies.decision import Limits
from policies.policy import Decision, Mode, Serving


class Planner:
    """Plans for one model. `draw_seed` gives the seed of a request to which the policy assigns none.

    `roles` says what the model's backends can do at the moment.
    """

    def __init__(
        self,
        info: Info,
        text: ModelText,
        tokens: PromptTokens,
        draw_seed: Callable[[], int],
        roles: Callable[[], Collection[Role]],
    ) -> None:
        self._info = info
        self._roles = roles
        self._text = text
        self._tokens = tokens
        self._draw_seed = draw_seed

    def decide(self, order: Order, caller: Caller) -> Decision:
        """What the policy gives the order; raises `RequestError` naming the field at fault, or `RoleRefused`."""
        roles = self._roles()
        serving = Serving(self._info.verify.window - 1, verifier="verify" in roles)
        decision = decide(caller, order.facts, serving)
        role: Role = "verify" if decision.mode is Mode.VERIFIED else "draft"
        if role not in roles:
            raise RoleRefused(f"mode {decision.mode} was asked for, and no backend can {role} now")
        most, asked = decision.limits.max_tokens, order.max_tokens
        if most is not None and asked is not None and asked > most:
            field = order.max_tokens_field
            raise errors.NotAllowed(f"{field} must be at most {most} here", param=field)
        return decision

    async def plan(self, order: Order, decision: Decision) -> Completion:
        """Raises `RequestError` naming the field at fault."""
        self._tokens.check_ids([id_ for id_, _ in order.sampling.logit_bias], "logit_bias")
        self._tokens.check_ids(order.stop_ids, "stop_token_ids")
        limits = decision.limits
        seed = self._draw_seed() if decision.seed is None else decision.seed
        sampling = msgspec.structs.replace(order.sampling, seed=seed, **decision.sampling)
        prompts = await self._tokens.encode(order.prompts, most=limits.prompt_tokens)
        return Completion(
            model=order.model,
            mode=decision.mode,
            fingerprint=self._info.fingerprint,
            jobs=tuple(job for prompt in prompts for job in self._jobs(order, prompt, sampling, limits)),
            choices=order.choices,
            stops=order.stops,
            continues=_continues(order.prompts[0]),
            spelled=self._spelled(order.prompts[0]),
            windows=decision.windows,
        )

    def _jobs(self, order: Order, prompt: tuple[int, ...], sampling: Sampling, limits: Limits) -> list[Job]:
        max_tokens = self._room(len(prompt), order, limits.max_tokens)
        if order.sampling.min_tokens > max_tokens:
            raise RequestError(f"min_tokens must be at most the {max_tokens} to generate", param="min_tokens")
        eos_ids = () if order.ignore_eos else self._text.eos_ids
        stop_ids = (*eos_ids, *(id_ for id_ in order.stop_ids if id_ not in eos_ids))
        return [
            Job(
                prompt=prompt,
                sampling=msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, index)),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                top_logprobs=order.top_logprobs,
            )
            for index in range(order.choices)
        ]

    def _room(self, prompt: int, order: Order, most: int | None) -> int:
        """How many tokens may be generated behind a prompt that fits; `most` where nothing else is asked for."""
        limit, asked = self._info.max_context, order.max_tokens
        if asked is None:
            return limit - prompt if most is None else min(most, limit - prompt)
        if prompt + asked > limit:
            raise ContextExceeded(
                f"this model's maximum context length is {limit} tokens, but {prompt + asked} were asked for"
                f" ({prompt} in the {field_of(order.prompts[0])}, {asked} in the completion)",
                param=order.max_tokens_field,
            )
        return asked

    def _spelled(self, prompt: Prompt) -> tuple[str, ...]:
        tool_format = self._text.tool_format
        return tool_format.spelled if tool_format and isinstance(prompt, ChatPrompt) and prompt.tools else ()


def _continues(prompt: Prompt) -> bool:
    return prompt.continues if isinstance(prompt, ChatPrompt) else True
