"""The engine's unit of work: one window-protocol call, from admission to its last token.

A task holds its tokens, how far their KV is computed, and what it has produced. It changes only through the scheduler.
Where its sampling has a grammar, `constraint` is that grammar at work for this call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from backend.engine.grammar import Constraint
from backend.engine.prefix_cache import Lease
from backend.protocol import Batching, Finish, Sampling, ScoredToken


@dataclass(frozen=True, slots=True)
class Scored:
    """A chosen token and its logprob; `top` is what the task asked for.

    `margin` is the top-1 minus the top-2 logit, in drafts; elsewhere nobody asks for it and it is 0.
    """

    id: int
    logprob: float
    margin: float
    top: list[ScoredToken]


@dataclass(frozen=True, slots=True)
class Unchosen:
    """No token could be chosen; `reason` says why. It breaks its task, unless it lies behind a refused draft.

    `field` is what the call has to answer for, None where it is not at fault.
    """

    reason: str
    field: str | None = None


@dataclass(slots=True, eq=False)
class DecodeTask:
    """Up to `count` tokens after a context: a draft where `is_draft`, else a stream. `batching` is a stream's alone.

    The last `generated` tokens of the context were generated. A stream that `yields` ends early, `yielded`, where what
    is left had better be drafted and verified.
    """

    context: list[int]
    count: int
    sampling: Sampling
    stop_ids: frozenset[int]
    top: int
    is_draft: bool
    generated: int = 0
    batching: Batching = "dynamic"
    yields: bool = False
    constraint: Constraint | None = None
    tokens: list[int] = field(init=False)
    computed: int = 0
    produced: list[Scored] = field(default_factory=list)
    finish: Finish | None = None
    yielded: bool = False
    lease: Lease | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.context)

    @property
    def in_fixed_lane(self) -> bool:
        """Which lane's KV it reads and writes."""
        return self.batching == "invariant"

    @property
    def done(self) -> bool:
        return self.finish is not None or self.yielded or len(self.produced) == self.count

    @property
    def top_as_logprobs(self) -> bool:
        """Drafts report logits, streams logprobs."""
        return not self.is_draft

    @property
    def capacity(self) -> int:
        """Tokens whose KV this task may come to hold. The last token chosen never enters the KV."""
        return len(self.context) + self.count - 1

    @property
    def valid(self) -> int:
        """How many leading tokens have KV. All of the context can be cached, yet its last row runs for its logits."""
        assert self.lease is not None
        return max(self.computed, self.lease.fixed if self.in_fixed_lane else self.lease.cached)

    @property
    def fixed(self) -> int:
        """How many leading tokens have fixed-lane KV. The fast lane adds none to what was leased."""
        assert self.lease is not None
        return self.valid if self.in_fixed_lane else self.lease.fixed


@dataclass(slots=True, eq=False)
class VerifyTask:
    """Replay a draft in the fixed lane: commit what agrees, and the verifier's own token.

    `tokens` are the context, what is committed, and the drafts not judged yet. The last `generated` tokens of the
    context were generated.
    """

    context: list[int]
    draft: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    top: int
    generated: int = 0
    constraint: Constraint | None = None
    tokens: list[int] = field(init=False)
    computed: int = 0
    produced: list[Scored] = field(default_factory=list)
    agreed: int = 0
    done: bool = False
    finish: Finish | None = None
    lease: Lease | None = None
    wants_draft: bool = True
    top_as_logprobs: bool = True
    in_fixed_lane: bool = True

    def __post_init__(self) -> None:
        self.tokens = self.context + self.draft

    @property
    def capacity(self) -> int:
        """Tokens whose KV this task may come to hold. The last token chosen never enters the KV."""
        return len(self.context) + len(self.draft)

    @property
    def valid(self) -> int:
        """How many leading tokens have KV that stands. Refused drafts are no longer among the tokens."""
        return self.computed

    @property
    def fixed(self) -> int:
        """All KV this task leaves is the fixed lane's."""
        return self.valid


Task: TypeAlias = DecodeTask | VerifyTask
