"""The gateway's words: what is generated (Job), what comes out of it (Token, Commit, Finished) and what it cost.

Owns the types that cross module boundaries inside the gateway. Knows neither HTTP nor OpenAI's field names. Sampling is
the window protocol's own type: the gateway has no second opinion on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from backend.protocol import Sampling
from policies.policy import Mode, Policy, RequestFacts, sees

Finish: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to generate: token ids in, up to `max_tokens` token ids out.

    `prompt` and `max_tokens` fit the model's context together. A token in `stop_ids` ends the sequence and is its last.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    top_logprobs: int

    def __post_init__(self) -> None:
        assert self.prompt
        assert self.max_tokens >= 1


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made in an earlier turn."""

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat, as the model's template sees it. `tool_call_id` says which call a tool's message answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def uses_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is a JSON schema, its keys in the client's order."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, for the model's template to make a prompt of.

    The prompt ends where the assistant's turn begins, or with what the last message said if it `continues` that one,
    or, with neither, behind the last turn. `variables` are for templates that know their names.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    opens_turn: bool = True
    continues: bool = False


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to go on with. With `special_tokens` the tokenizer puts those around it that it puts around any text."""

    text: str
    special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is token ids already."""

    ids: tuple[int, ...]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks for, valid in itself but not yet matched with a model, a policy or free capacity.

    `choices` is the number of completions of each of the `prompts`. `sampling` holds no seed yet: the policy decides it
    from `facts`, and what else the client left open. `max_tokens` None means as many as fit. `stop_ids` end the
    sequence as the model's own do, which `ignore_eos` takes out. `max_tokens_field` and `grammar_field` are what the
    client calls these, for errors to say.
    """

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    facts: RequestFacts
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    choices: int
    top_logprobs: int
    ignore_eos: bool
    max_tokens_field: str = field(default="max_tokens", compare=False)
    grammar_field: str = field(default="response_format", compare=False)

    @property
    def places(self) -> int:
        """How many completions it takes."""
        return len(self.prompts) * self.choices


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and the policy that was in force when they did: it holds for the whole of their request."""

    policy: Policy
    tenant: str

    def sees(self, model: str) -> bool:
        """Whether the model exists for them."""
        return sees(self.policy, self.tenant, model)


@dataclass(frozen=True, slots=True)
class Completion:
    """An order made concrete: all that its answer depends on, and the window schedule, on which it does not depend.

    The jobs of one prompt stand together, `choices` of them. An answer that `continues` its prompt's text begins with
    whatever the tokens say; one that is a text of its own begins as the tokenizer begins a text. `spelled` are special
    tokens that its text shows.
    """

    model: str
    mode: Mode
    fingerprint: str
    jobs: tuple[Job, ...]
    choices: int
    stops: tuple[str, ...]
    continues: bool
    spelled: tuple[str, ...]
    windows: tuple[int, ...]

    @property
    def seed(self) -> int:
        """The seed of the first choice, which is the request's."""
        return self.jobs[0].sampling.seed

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once."""
        return sum(len(job.prompt) for job in self.jobs[:: self.choices])


class Scored(msgspec.Struct, frozen=True, gc=False):
    """A token id beside a logprob. A struct, as a token is: these are made for every token of every answer."""

    id: int
    logprob: float


class Token(msgspec.Struct, frozen=True, gc=False):
    """A token that stands, with its logprob and the most likely alternatives, best first."""

    id: int
    logprob: float
    top: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """What a completion cost so far.

    `windows` are the verify and decode calls, each of which committed something. `rollbacks` are those that rejected
    part of a draft; `drafted` and `rolled_back` count tokens, of drafts that were verified. `ahead` are drafts begun
    while the window before was verified, `ahead_dropped` those of them that were of no use.
    """

    windows: int = 0
    rollbacks: int = 0
    drafted: int = 0
    rolled_back: int = 0
    ahead: int = 0
    ahead_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.windows + other.windows,
            self.rollbacks + other.rollbacks,
            self.drafted + other.drafted,
            self.rolled_back + other.rolled_back,
            self.ahead + other.ahead,
            self.ahead_dropped + other.ahead_dropped,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that will never change again, at least one, and the counts so far."""

    tokens: tuple[Token, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a completion's tokens: an end-of-sequence token ("stop") or no room for another ("length")."""

    finish: Finish


Progress: TypeAlias = Commit | Finished
"""What generating a job yields: one or more commits, then the end."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, and the tokens that have been consumed since the last delta. Either may be empty, not both."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class ChoiceDeltas:
    """A choice moved on. Empty deltas say that tokens were committed but none of their text may be shown yet."""

    index: int
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice is complete; `completion_tokens` counts the tokens consumed, the one that ended it included."""

    index: int
    finish: Finish
    completion_tokens: int
    counts: Counts


ChoiceEvent: TypeAlias = ChoiceDeltas | ChoiceFinished


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n choices.

    The first keeps the request's seed, so that it equals the answer to n=1.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(f"verbatim choice {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
