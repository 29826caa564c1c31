"""What a policy file says, as a value: sections of settings, tenants with their credentials, and a few words for all.

Owns these types and the policy that holds without a file. Knows neither YAML nor how a request is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from policies import settings
from policies.api_keys import ApiKey, KeyRing
from policies.settings import Mode

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Rule:
    """One section of a policy: its path, and the settings it makes, by their paths, as their kinds parsed them."""

    name: str
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who may be asking: the section, the keys, and the values of the JWT claim that stand for the tenant."""

    name: str
    rule: Rule
    keys: tuple[ApiKey, ...] = ()
    jwt_claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Jwt:
    """How JSON web tokens are judged. Just one of `jwks_url` and `jwks_file` is given; `jwks` is the file's text."""

    issuer: str
    audience: str
    tenant_claim: str
    algorithms: tuple[str, ...]
    leeway_s: int
    jwks_url: str | None = None
    jwks_file: str | None = None
    jwks: str | None = None


class Unavailable(StrEnum):
    """What becomes of requests while their limits cannot be counted."""

    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Policy:
    """`anonymous` is the tenant of requests without credentials; None refuses them. `version` is the text's digest."""

    tenants: Mapping[str, Tenant]
    defaults: Rule = Rule("defaults")
    models: Mapping[str, Rule] = field(default_factory=dict)
    routes: Mapping[str, Rule] = field(default_factory=dict)
    anonymous: str | None = None
    jwt: Jwt | None = None
    limits_unavailable: Unavailable = Unavailable.DENY
    version: str = "built-in"
    key_ring: KeyRing = field(init=False, compare=False)
    tenant_by_claim: Mapping[str, str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        tenants = self.tenants.values()
        keys = KeyRing((tenant.name, key) for tenant in tenants for key in tenant.keys)
        claims = {claim: tenant.name for tenant in tenants for claim in tenant.jwt_claims}
        object.__setattr__(self, "key_ring", keys)
        object.__setattr__(self, "tenant_by_claim", claims)


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """A policy that stays in force."""

    current: Policy


DEFAULT_POLICY = Policy(
    tenants={ANONYMOUS: Tenant(ANONYMOUS, Rule(f"tenants.{ANONYMOUS}"))},
    defaults=Rule("defaults", {settings.ALLOW.path: tuple(Mode)}),
    anonymous=ANONYMOUS,
)
"""Without a policy file: everybody is welcome, and may ask for any mode."""
