"""What a base URL of a backend or an upstream may be.

It is shown in logs, metrics and traces, so it must hold no credentials.
"""

from __future__ import annotations

from urllib.parse import urlsplit


def parse_base_url(value: object) -> str:
    """The URL without a slash at its end; raises `ValueError`, which does not repeat the value."""
    if isinstance(value, str):
        parts = urlsplit(value)
        host = parts.hostname
        if parts.scheme in ("http", "https") and host and _can_be_found(host) and not (parts.query or parts.fragment):
            try:
                port = parts.port
            except ValueError as error:
                raise ValueError(f"has no right port: {error}") from None
            if port == 0:
                raise ValueError("has no right port: 0")
            if parts.username is not None or parts.password is not None:
                raise ValueError("must not hold a user or a password: it is shown in logs and metrics")
            return value.rstrip("/")
    raise ValueError("must be an http:// or https:// URL")


def _can_be_found(host: str) -> bool:
    """Whether a host can be looked up: not one with an empty label, or one too long. An address has none."""
    try:
        return ":" in host or bool(host.encode("idna"))
    except UnicodeError:
        return False
