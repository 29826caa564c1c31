"""Which guarantee a request gets, and within which bounds: a pure function of a policy and of what the request says.

Owns the precedence of a policy's sections and what a request may override. Knows nothing of HTTP bodies, files or
backends beyond the few facts handed in.

Each setting is looked up for itself: the first section in the order of `PRECEDENCE` that makes it decides it.

The body and the header are equals. Neither wins: a request whose two voices differ is refused, because whichever were
obeyed, somebody would hold an answer with a guarantee other than the one they asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from policies import settings
from policies.decision import (
    Cache,
    Decision,
    Limits,
    NoSuchModel,
    NotAllowed,
    PolicyError,
    Quota,
    Rate,
    Receipt,
    RequestFacts,
    Serving,
)
from policies.document import DEFAULT_POLICY, Policy, Rule, Tenant
from policies.kinds import matches
from policies.settings import CacheScope, Key, Mode, ReceiptMode, ReceiptPrompt, WithoutVerifier

__all__ = [
    "BODY_FIELD",
    "DEFAULT_POLICY",
    "HEADER",
    "PRECEDENCE",
    "RECEIPT_HEADER",
    "Chosen",
    "Decision",
    "Mode",
    "Policy",
    "PolicyError",
    "RequestFacts",
    "Serving",
    "demands_receipts",
    "requests_limit",
    "resolve",
    "sees",
    "window_schedule",
]

BODY_FIELD = "is_deterministic"
HEADER = "X-Verbatim-Determinism"
RECEIPT_HEADER = "X-Verbatim-Receipt"
REQUEST = "request"
DRAWN = "drawn"
"""Stand for a rule's name where the request itself decided, and where chance will."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layer:
    """One step of the precedence: its place in the file, whom it speaks of, and how a request finds it."""

    name: str
    whom: str
    find: Callable[[Policy, Tenant, RequestFacts], Rule | None]


def _model_rule(policy: Policy, tenant: Tenant, request: RequestFacts) -> Rule | None:
    found = [pattern for pattern in policy.models if matches(pattern, request.model)]
    # Patterns that match the same name are each other's beginnings: the longest is the narrowest, the bare name wins.
    return policy.models[max(found, key=lambda name: (not name.endswith("*"), len(name)))] if found else None


PRECEDENCE = (
    Layer("tenants.<name>", "requests of one tenant", lambda policy, tenant, request: tenant.rule),
    Layer("routes.<path>", "requests to one path", lambda policy, tenant, request: policy.routes.get(request.route)),
    Layer("models.<name>", "requests for one model, or for all whose names begin alike (`name*`)", _model_rule),
    Layer("defaults", "all requests", lambda policy, tenant, request: policy.defaults),
)
"""Who decides a setting: the first of these that makes it. What none of them makes is as built in."""


class Chosen:
    """The settings that hold for one request, each with the rule that made it."""

    def __init__(self, policy: Policy, tenant: Tenant, request: RequestFacts) -> None:
        found = (layer.find(policy, tenant, request) for layer in PRECEDENCE)
        self._rules = [rule for rule in found if rule is not None]

    def __repr__(self) -> str:
        return f"<Chosen from {[rule.name for rule in self._rules]}>"

    def __getitem__(self, key: Key[T]) -> T:
        for rule in self._rules:
            if key.path in rule.values:
                return cast(T, rule.values[key.path])
        return key.built_in

    def scope(self, key: Key[T]) -> str:
        """The name of the rule that made a setting."""
        return next((rule.name for rule in self._rules if key.path in rule.values), "built-in")

    def rule(self, key: Key[T]) -> str:
        """The full path of a setting in the file, or that it is built in."""
        return f"{self.scope(key)}.{key.path}"


def resolve(policy: Policy, tenant: str, request: RequestFacts, serving: Serving) -> Decision:
    """Decide for one request of one tenant; raises `PolicyError`, and nothing else, for what it may not have."""
    if tenant not in policy.tenants:
        raise NotAllowed("the tenant is not in the policy", "authorization")
    chosen = Chosen(policy, policy.tenants[tenant], request)
    if not _is_allowed(chosen, request.model):
        raise NoSuchModel(f"the model {request.model!r} does not exist", "model")
    mode, rule = _mode(chosen, request)
    seed, seed_rule = _seed(chosen, request, mode)
    receipt = _receipt(chosen, request, mode)
    wants_verifier = mode is Mode.VERIFIED and not serving.verifier
    # Who asks for a receipt would not hold what they asked for.
    degraded = wants_verifier and chosen[settings.NO_VERIFIER] is WithoutVerifier.DEGRADE and not _asks_receipt(request)
    return Decision(
        mode=Mode.OFF if degraded else mode,
        rule=chosen.rule(settings.NO_VERIFIER) if degraded else rule,
        degraded=degraded,
        seed=seed,
        seed_rule=seed_rule,
        windows=_windows(chosen, serving.max_draft),
        sampling=_sampling(chosen, request),
        limits=_limits(chosen),
        cache=_cache(chosen, request, tenant) if mode is Mode.VERIFIED and not degraded else None,
        receipt=None if degraded else receipt,
    )


def demands_receipts(policy: Policy) -> str | None:
    """The first setting by which some answer gets a receipt, which takes a key to sign it; None where there is none."""
    tenants = (tenant.rule for tenant in policy.tenants.values())
    for rule in (policy.defaults, *tenants, *policy.routes.values(), *policy.models.values()):
        if rule.values.get(settings.RECEIPTS.path, ReceiptMode.NEVER) is not ReceiptMode.NEVER:
            return f"{rule.name}.{settings.RECEIPTS.path}"
    return None


def sees(policy: Policy, tenant: str, model: str) -> bool:
    """Whether a model exists for a tenant of the policy's, on some route or other."""
    routes = ("", *policy.routes)
    asking = (Chosen(policy, policy.tenants[tenant], RequestFacts(model=model, route=route)) for route in routes)
    return any(_is_allowed(chosen, model) for chosen in asking)


def requests_limit(policy: Policy, tenant: str, model: str) -> Rate | None:
    """How many requests a minute a tenant may make that ask something of a model and generate nothing."""
    return _limits(Chosen(policy, policy.tenants[tenant], RequestFacts(model=model))).requests


def window_schedule(first: int, max_draft: int) -> tuple[int, ...]:
    """Draft lengths that double from `first` up to `max_draft`: text comes early, long answers run at full window."""
    assert first >= 1
    assert max_draft >= 0
    windows = []
    size = first
    while size < max_draft:
        windows.append(size)
        size *= 2
    return (*windows, max_draft)


def _is_allowed(chosen: Chosen, model: str) -> bool:
    return any(matches(pattern, model) for pattern in chosen[settings.ALLOWED_MODELS])


def _mode(chosen: Chosen, request: RequestFacts) -> tuple[Mode, str]:
    mode, asked = chosen[settings.MODE], _asked_mode(request)
    if asked is None or asked is mode:
        return mode, chosen.rule(settings.MODE)
    allowed = chosen[settings.ALLOW]
    if asked not in allowed:
        field = BODY_FIELD if request.header is None else HEADER
        words = ", ".join(dict.fromkeys((mode, *allowed)))
        raise NotAllowed(f"mode {asked} may not be asked for here; allowed are: {words}", field)
    return asked, chosen.rule(settings.ALLOW)


def _asked_mode(request: RequestFacts) -> Mode | None:
    by_header = None if request.header is None else _parse_header(request.header)
    if request.is_deterministic is None:
        return by_header
    by_body = Mode.VERIFIED if request.is_deterministic else Mode.OFF
    if by_header is not None and by_header is not by_body:
        raise PolicyError(f"the body asks for mode {by_body} but {HEADER} says {by_header}", BODY_FIELD)
    return by_body


def _parse_header(value: str) -> Mode:
    try:
        return Mode(value.strip().lower())
    except ValueError:
        raise PolicyError(f"{HEADER} must be one of {', '.join(Mode)}", HEADER) from None


def _seed(chosen: Chosen, request: RequestFacts, mode: Mode) -> tuple[int | None, str]:
    if request.seed is not None and chosen[settings.CLIENT_SEED]:
        return request.seed, REQUEST
    # Whoever asks for no guarantee expects another answer each time, so only the other modes have a default.
    return (None, DRAWN) if mode is Mode.OFF else (chosen[settings.SEED], chosen.rule(settings.SEED))


def _windows(chosen: Chosen, max_draft: int) -> tuple[int, ...]:
    largest = chosen[settings.LARGEST_WINDOW]
    return window_schedule(chosen[settings.FIRST_WINDOW], max_draft if largest is None else min(max_draft, largest))


def _sampling(chosen: Chosen, request: RequestFacts) -> dict[str, float]:
    open_parameters = {}
    for name, keys in settings.SAMPLING.items():
        least, most = chosen[keys.least], chosen[keys.most]
        given = request.sampling.get(name)
        if given is None:
            open_parameters[name] = max(least, min(most, chosen[keys.default]))
        elif not least <= given <= most:
            bounds = f"{least:g}" if least == most else f"between {least:g} and {most:g}"
            raise NotAllowed(f"{name} must be {bounds} here", name)
    return open_parameters


def _cache(chosen: Chosen, request: RequestFacts, tenant: str) -> Cache | None:
    scope = chosen[settings.CACHE_SCOPE]
    said = _directives(request.cache_control) if chosen[settings.CACHE_CONTROL] else frozenset[str]()
    read = chosen[settings.CACHE_READ] and "no-cache" not in said
    write = chosen[settings.CACHE_WRITE]
    if scope is CacheScope.NONE or "no-store" in said or not (read or write):
        return None
    return Cache(
        tenant=None if scope is CacheScope.SHARED else tenant,
        read=read,
        write=write,
        ttl_s=chosen[settings.CACHE_TTL_S],
        max_tokens=chosen[settings.CACHE_TOKENS],
    )


def _receipt(chosen: Chosen, request: RequestFacts, mode: Mode) -> Receipt | None:
    kept, asked = chosen[settings.RECEIPTS], _asks_receipt(request)
    if asked and mode is not Mode.VERIFIED:
        raise PolicyError(f"a receipt says what was verified, and mode {mode} verifies nothing", RECEIPT_HEADER)
    if asked and kept is ReceiptMode.NEVER:
        raise NotAllowed("no receipts are made here", RECEIPT_HEADER)
    if asked is False and kept is ReceiptMode.ALWAYS and mode is Mode.VERIFIED:
        raise NotAllowed("a receipt is made of every verified answer here", RECEIPT_HEADER)
    if mode is not Mode.VERIFIED or not (asked or kept is ReceiptMode.ALWAYS):
        return None
    return Receipt(chosen[settings.RECEIPT_TTL_S], chosen[settings.RECEIPT_PROMPT] is ReceiptPrompt.TOKENS)


def _asks_receipt(request: RequestFacts) -> bool | None:
    if request.receipt is None:
        return None
    said = request.receipt.strip().lower()
    if said not in ("true", "false"):
        raise PolicyError(f"{RECEIPT_HEADER} must be true or false", RECEIPT_HEADER)
    return said == "true"


def _directives(header: str) -> frozenset[str]:
    """The names in a `Cache-Control` header (RFC 9111, 5.2)."""
    return frozenset(part.partition("=")[0].strip().lower() for part in header.split(","))


def _limits(chosen: Chosen) -> Limits:
    def rate(key: Key[int | None]) -> Rate | None:
        limit = chosen[key]
        return None if limit is None else Rate(limit, chosen[settings.BURST_S], chosen.scope(key))

    concurrency = chosen[settings.CONCURRENCY]
    return Limits(
        requests=rate(settings.REQUESTS_PER_MINUTE),
        tokens=rate(settings.TOKENS_PER_MINUTE),
        concurrency=None if concurrency is None else Quota(concurrency, chosen.scope(settings.CONCURRENCY)),
        queue_share=chosen[settings.QUEUE_SHARE],
        max_tokens=chosen[settings.MAX_TOKENS],
        prompt_tokens=chosen[settings.PROMPT_TOKENS],
    )
