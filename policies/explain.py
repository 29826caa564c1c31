"""Why a request gets what it gets: each part of its decision, and each setting, with the rule that made it.

Owns the order and the wording; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies import settings
from policies.decision import Decision
from policies.kinds import UNLIMITED
from policies.policy import REQUEST, Chosen, Policy, RequestFacts, Serving, resolve
from policies.settings import KEYS, SAMPLING


@dataclass(frozen=True, slots=True)
class Line:
    """One part, its value as the file would say it, and the full path of the key that made it."""

    part: str
    value: str
    rule: str


def explain(policy: Policy, tenant: str, request: RequestFacts, serving: Serving) -> tuple[list[Line], list[Line]]:
    """The decision's parts, then all settings that hold for the request. Raises `PolicyError` as `resolve` does."""
    decision = resolve(policy, tenant, request, serving)
    chosen = Chosen(policy, policy.tenants[tenant], request)
    parts = [
        Line("mode", decision.mode, decision.rule),
        Line("seed", "drawn for each request" if decision.seed is None else str(decision.seed), decision.seed_rule),
    ]
    for name, keys in SAMPLING.items():
        if name in request.sampling:
            parts.append(Line(name, say(request.sampling[name]), REQUEST))
        else:
            parts.append(Line(name, say(decision.sampling[name]), chosen.rule(keys.default)))
    parts.append(Line("cache", _say_cache(decision), chosen.rule(settings.CACHE_SCOPE)))
    parts.append(Line("receipt", _say_receipt(decision), chosen.rule(settings.RECEIPTS)))
    return parts, [Line(key.path, say(chosen[key]), chosen.rule(key)) for key in KEYS]


def _say_cache(decision: Decision) -> str:
    cache = decision.cache
    if cache is None:
        return "off"
    does = " and ".join(word for word, may in (("read", cache.read), ("write", cache.write)) if may)
    return f"{does}, {'shared' if cache.tenant is None else 'own'}"


def _say_receipt(decision: Decision) -> str:
    receipt = decision.receipt
    if receipt is None:
        return "none"
    return f"kept {receipt.ttl_s} s, {'with the prompt' if receipt.holds_prompt else 'with a digest of the prompt'}"


def say(value: object) -> str:
    """A setting's value as the file would say it."""
    if value is None:
        return UNLIMITED
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
