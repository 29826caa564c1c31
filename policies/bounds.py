"""Whether the bounds that different sections set can meet in one request and leave nothing between them.

Each setting is decided for itself, so a tenant's least temperature can come together with a model's greatest. Owns this
one check of a policy as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from policies.document import Policy, Rule
from policies.settings import SAMPLING, Key


def contradictions(policy: Policy) -> Iterator[tuple[str, str]]:
    """For each parameter that some request could not set to any value: a tenant it can happen to, and what is wrong."""
    tenants = {tenant.rule.name: tenant for tenant in policy.tenants.values()}
    layers = (
        [tenant.rule for tenant in tenants.values()],
        [*policy.routes.values(), _NOTHING],
        [*policy.models.values(), _NOTHING],
        [policy.defaults],
    )
    for name, keys in SAMPLING.items():
        relevant = [_saying(layer, keys.least, keys.most) for layer in layers]
        for rules in product(*relevant):
            (least, low), (most, high) = _first(rules, keys.least), _first(rules, keys.most)
            if least > most:
                where = f"{low}.{keys.least.path} is {least:g} and {high}.{keys.most.path} is {most:g}"
                yield tenants[rules[0].name].name, f"no {name} would be allowed where both hold: {where}"
                break


_NOTHING = Rule("built-in")


def _saying(layer: Sequence[Rule], *keys: Key[float]) -> list[Rule]:
    """The rules that make one of the settings, and one that makes neither if there is any."""
    paths = [key.path for key in keys]
    saying, silent = list[Rule](), list[Rule]()
    for rule in layer:
        (saying if any(path in rule.values for path in paths) else silent).append(rule)
    return [*saying, *silent[:1]]


def _first(rules: Sequence[Rule], key: Key[float]) -> tuple[float, str]:
    for rule in rules:
        if key.path in rule.values:
            value = rule.values[key.path]
            assert isinstance(value, float)
            return value, rule.name
    return key.built_in, "built-in"
