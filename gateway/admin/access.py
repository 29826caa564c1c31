"""Who may operate the gateway: whoever shows the one admin key.

The gateway is given the hash that `verbatim keys new` prints, never the key. Tenants' keys open nothing here, and the
admin key opens nothing of theirs: it stands in no policy.
"""

from __future__ import annotations

from gateway.errors import NotAllowed, Unauthenticated
from policies.api_keys import ApiKey, parse_hash


class AdminAccess:
    """The admin key, as the hash that is kept of it; None where there is none and nobody is let in."""

    def __init__(self, hash_: str | None) -> None:
        """Raises `ValueError` for what is no hash; it does not repeat the value, which may be a key."""
        self._kept = None if hash_ is None else ApiKey("admin", *parse_hash(hash_))

    def __repr__(self) -> str:
        return f"<AdminAccess {'closed' if self._kept is None else 'by key'}>"

    def check(self, authorization: str | None) -> None:
        """Let the bearer of an Authorization header in; raises `NotAllowed` or `Unauthenticated`.

        Takes the same time whatever the key.
        """
        if self._kept is None:
            raise NotAllowed(
                "this gateway has no admin key: make one with `verbatim keys new` and start the gateway with its hash"
                " as --admin-key or VERBATIM_ADMIN_KEY",
                param="authorization",
            )
        scheme, _, credential = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not self._kept.admits(credential.strip(), 0.0):
            raise Unauthenticated("the admin key is needed: Authorization: Bearer vb_...", param="authorization")
