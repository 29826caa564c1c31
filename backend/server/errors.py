"""Errors of the window protocol and the one place where they become HTTP.

CallError
├── raised for a call that cannot be served as it stands: status and `ErrorDetail` say why
"""

from __future__ import annotations

import re

import msgspec

from backend.protocol import ErrorDetail

STATUS = {
    "invalid_request": 400,
    "not_found": 404,
    "role_refused": 409,
    "too_large": 413,
    "overloaded": 429,
    "internal": 500,
    "unavailable": 503,
}

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_NAMED = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<name>[^`]+)`")


class CallError(Exception):
    """A call is refused or has failed."""

    def __init__(self, type: str, message: str, field: str | None = None):
        super().__init__(message)
        self.detail = ErrorDetail(type=type, message=message, field=field)
        self.status = STATUS[type]


def from_decoding(error: msgspec.DecodeError) -> CallError:
    """What a body that does not decode is answered with; names the field where there is one."""
    message = str(error)
    located = _PATH.search(message)
    path = located["path"] if located else ""
    reason = _PATH.sub("", message)
    named = _NAMED.match(reason)
    # Checks of ours begin with the name of the field they are about.
    own = reason.split(" ", 1)[0]
    name = named["name"] if named else own if own.isidentifier() and own not in {"Expected", "Invalid"} else ""
    field = ".".join(part for part in (path, name) if part)
    if not isinstance(error, msgspec.ValidationError):
        return CallError("invalid_request", f"the body is not JSON: {message}")
    return CallError("invalid_request", reason, field or None)
