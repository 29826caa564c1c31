"""Who is asking: from the Authorization header to a tenant of the policy in force.

Owns the order of the ways in: an API key, a JSON web token where the policy takes them, nobody in particular where it
welcomes that. Never shows a credential, in errors and logs least of all.

What is shaped like none of ours counts as no credentials, because OpenAI's clients cannot send none. What is shaped
like one and does not hold is refused: an expired key must not become somebody else's rights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import jwt
from jwt import PyJWK, PyJWTError

from gateway.domain import Caller
from gateway.errors import NotAllowed, RequestError, Unauthenticated
from policies.api_keys import PREFIX
from policies.document import Jwt, Policy

MAX_TOKEN_CHARS = 8192

log = logging.getLogger(__name__)


class Policies(Protocol):
    """Where the policy in force is."""

    @property
    def current(self) -> Policy: ...


class Keys(Protocol):
    """Where the keys are that tokens are checked with."""

    async def find(self, jwt: Jwt, id_: str | None, algorithm: str) -> PyJWK | None: ...


class Authenticator:
    """Tells callers by their credentials. `clock` counts seconds since 1970."""

    def __init__(self, policies: Policies, keys: Keys, clock: Callable[[], float]) -> None:
        self.policies = policies
        self._keys = keys
        self._clock = clock

    def as_tenant(self, tenant: str | None) -> Caller:
        """A tenant as a caller, for an operator who asks on its behalf; None for who shows no credentials.

        Raises `RequestError`.
        """
        policy = self.policies.current
        tenant = policy.anonymous if tenant is None else tenant
        if tenant is None:
            raise RequestError("tenant is required: this policy lets nobody in without credentials", param="tenant")
        if tenant not in policy.tenants:
            raise RequestError(f"there is no tenant {tenant!r} in the policy", param="tenant")
        return Caller(policy, tenant)

    async def caller(self, authorization: str | None) -> Caller:
        """The caller behind a header; raises `Unauthenticated`, `NotAllowed` or `IssuerUnavailable`."""
        policy = self.policies.current
        scheme, _, credential = (authorization or "").partition(" ")
        credential = credential.strip() if scheme.lower() == "bearer" else ""
        if credential.startswith(PREFIX):
            tenant = policy.key_ring.tenant_of(credential, self._clock())
            if tenant is None:
                raise Unauthenticated("the API key is not valid", param="authorization")
            return Caller(policy, tenant)
        if policy.jwt is not None and credential.count(".") == 2:
            return Caller(policy, await self._tenant_of_token(policy, policy.jwt, credential))
        if policy.anonymous is None:
            raise Unauthenticated("an API key is needed: Authorization: Bearer vb_...", param="authorization")
        return Caller(policy, policy.anonymous)

    async def _tenant_of_token(self, policy: Policy, rules: Jwt, token: str) -> str:
        try:
            claims = await self._claims(rules, token)
        except PyJWTError as error:
            log.debug("a token is refused: %s", type(error).__name__)
            raise Unauthenticated("the token is not valid", param="authorization") from error
        claim = claims.get(rules.tenant_claim)
        tenant = policy.tenant_by_claim.get(claim) if isinstance(claim, str) else None
        if tenant is None:
            raise NotAllowed("the token stands for no tenant here", param="authorization")
        return tenant

    async def _claims(self, rules: Jwt, token: str) -> dict[str, object]:
        """The claims of a token that is right in every respect; raises `PyJWTError`."""
        if len(token) > MAX_TOKEN_CHARS:
            raise jwt.DecodeError("the token is too long")
        header = jwt.get_unverified_header(token)
        algorithm, id_ = header.get("alg"), header.get("kid")
        # Checked before a key is looked for, so that the header cannot choose a weaker way to use it.
        if algorithm not in rules.algorithms or not (id_ is None or isinstance(id_, str)):
            raise jwt.InvalidAlgorithmError("not an algorithm of the policy's")
        key = await self._keys.find(rules, id_, algorithm)
        if key is None:
            raise jwt.InvalidKeyError("no such key")
        claims: dict[str, object] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=rules.audience,
            issuer=rules.issuer,
            leeway=rules.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )
        return claims
