"""What goes into a decision and what comes out of it, and how a request can be refused.

Owns the types that the gateway and the policies share. Holds no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.settings import Mode


class PolicyError(ValueError):
    """A request contradicts itself or asks for what there is not; `field` names the body field or header at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class NotAllowed(PolicyError):
    """A request asks for what the policy does not allow it."""


class NoSuchModel(PolicyError):
    """The policy does not show this model to the request."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What one request says that a policy has a say in; None where it says nothing.

    `header`, `cache_control` and `receipt` are headers' raw values; `sampling` has the parameters that the request
    gives, by name.
    """

    is_deterministic: bool | None = None
    header: str | None = None
    seed: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    route: str = ""
    cache_control: str = ""
    receipt: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """What the model's backends can do now. `max_draft` is the longest draft a verifier takes, 0 for none."""

    max_draft: int
    verifier: bool = True


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a minute, `burst_s` seconds' worth of them at once. `scope` names the rule: what it covers is counted."""

    per_minute: int
    burst_s: float
    scope: str


@dataclass(frozen=True, slots=True)
class Quota:
    """So many at a time. `scope` names the rule: what it covers is counted."""

    count: int
    scope: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request counts against; None for no limit. `queue_share` is a fraction of a gateway's places."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: Quota | None = None
    queue_share: float = 1.0
    max_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """What one request may do with the commit log. `tenant` is whose log it is, None for one that is shared.

    What is added is kept for `ttl_s` behind the last token, and up to `max_tokens` of an answer.
    """

    tenant: str | None
    read: bool
    write: bool
    ttl_s: int
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt is made of the answer and kept for `ttl_s`; it holds the prompt, or a digest of it alone."""

    ttl_s: int
    holds_prompt: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request gets.

    `rule` is the key in the policy that gave or allowed the mode, `seed_rule` the one that made the seed. `degraded`
    says that the mode is off only because no verifier is there. `seed` None asks for one to be drawn: who asks for
    nothing expects another answer each time. `windows` are lengths in order, of drafts or of what the verifier decodes
    by itself; the last one repeats. They never change the result. `sampling` has the parameters that the request left
    open. `cache` None takes nothing from the commit log and leaves nothing in it. `receipt` None makes none.
    """

    mode: Mode
    rule: str
    degraded: bool
    seed: int | None
    seed_rule: str
    windows: tuple[int, ...]
    sampling: Mapping[str, float]
    limits: Limits
    cache: Cache | None
    receipt: Receipt | None = None
