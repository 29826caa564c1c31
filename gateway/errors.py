"""Every way a request or a start can fail, and how OpenAI's envelope says it.

    GatewayError
    ├── ConfigError                a setting is wrong; stops the start
    ├── StartError                 the backend did not come up in time, or is not what it must be
    ├── RequestError          400  the request is at fault; `param` names the field
    │   ├── ContextExceeded   400  code context_length_exceeded
    │   ├── BodyTooLarge      413
    │   ├── UnsupportedMedia  415
    │   ├── ModelNotFound     404  code model_not_found
    │   ├── LogNotFound       404  code log_not_found; for operators
    │   ├── ReceiptNotFound   404  code receipt_not_found
    │   ├── NotAllowed        403  the policy does not allow it
    │   └── Unauthenticated   401  no credentials, or none that hold
    ├── Overloaded            429  admission is full; with Retry-After
    │   └── RateLimited       429  a tenant's limit is reached; with x-ratelimit-* too
    ├── LogsUnavailable       503  the store of the commit logs does not answer; for operators: requests go on without
    ├── IssuerUnavailable     503  the keys that tokens are checked with cannot be fetched
    ├── ReceiptsUnavailable   503  the store of receipts does not answer
    ├── LimitsUnavailable     503  the limits cannot be counted, and the policy's word is to deny
    ├── AnswerTimeout         504  the whole answer took longer than one may
    ├── Draining              503  the gateway is shutting down; with Retry-After
    ├── RoleRefused           503  the backend does not play the role the request needs
    └── BackendError               the backend is at fault
        ├── BackendUnavailable 503 it says it is not ready, or there is none
        │   └── BackendUnreachable it cannot be reached
        ├── BackendTimeout    504  it took too long
        ├── BackendFailed     502  it answered 5xx, broke off, or sent what cannot be read
        │   └── ProtocolViolation  it answered, and the answer breaks the window protocol
        └── BackendRefused  4xx    it refused the call; its status and Retry-After pass through

`ClientLeft` is no error: it tells the HTTP edge that nobody is listening any more. Each boundary translates once and
keeps the cause (`raise ... from`): the backend client and the HTTP client for the wire, the service for policies.
"""

from __future__ import annotations

from collections.abc import Mapping


class GatewayError(Exception):
    """Base of the tree. Subclasses set how the envelope describes them."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """What the response says beside its body."""
        return {} if self.retry_after_s is None else {"retry-after": self.retry_after_s}

    def envelope(self) -> dict[str, object]:
        """The body OpenAI would send."""
        return envelope(self.message, self.type, self.param, self.code)


def envelope(message: str, type_: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


class ConfigError(GatewayError):
    """A setting is wrong; the message names its key and where it came from."""


class StartError(GatewayError):
    """The backend did not become ready, or cannot serve this gateway."""


class RequestError(GatewayError):
    """The request is at fault. `code` is OpenAI's word for how; a bad value where nothing else is said of a field."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code or self.code or (None if param is None else "invalid_value")


class ContextExceeded(RequestError):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    """The request body is over the limit."""

    status = 413
    code = "request_too_large"


class UnsupportedMedia(RequestError):
    """The request body is declared as something other than JSON."""

    status = 415


class ModelNotFound(RequestError):
    """No such model here."""

    status = 404
    code = "model_not_found"


class LogNotFound(RequestError):
    """No commit log has this key."""

    status = 404
    code = "log_not_found"


class ReceiptNotFound(RequestError):
    """No such receipt of this tenant's: whether there is one of another's, nobody is told."""

    status = 404
    code = "receipt_not_found"


class NotAllowed(RequestError):
    """The policy does not allow it."""

    status = 403
    code = "not_allowed"


class Unauthenticated(RequestError):
    """The request shows no credentials, or none that hold. Never says which part of them is wrong."""

    status = 401
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Overloaded(GatewayError):
    """All places are taken; refused before any work starts. `reason` says for want of what."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, reason: str, retry_after_s: str) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class RateLimited(Overloaded):
    """A limit of the tenant's is reached. `headers` say where it stands."""

    def __init__(self, message: str, *, reason: str, retry_after_s: str, headers: Mapping[str, str]) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)
        self._headers = dict(headers)

    @property
    def headers(self) -> dict[str, str]:
        return self._headers | super().headers


class LimitsUnavailable(GatewayError):
    """The store of the limits does not answer, and the policy's word is to deny."""

    status = 503
    code = "limits_unavailable"


class LogsUnavailable(GatewayError):
    """The store of the commit logs does not answer an operator. Requests go on without it."""

    status = 503
    code = "logs_unavailable"


class ReceiptsUnavailable(GatewayError):
    """Receipts cannot be looked up: their store does not answer, or not in a way that can be read here."""

    status = 503
    code = "receipts_unavailable"


class IssuerUnavailable(GatewayError):
    """Tokens cannot be checked: the keys for that cannot be fetched."""

    status = 503
    code = "issuer_unavailable"


class Draining(GatewayError):
    """The gateway finishes what it has and takes nothing new: the connection is closed, for the next one to be made
    elsewhere."""

    status = 503
    code = "shutting_down"

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | {"connection": "close"}


class AnswerTimeout(GatewayError):
    """The answer took longer than one may, although nobody it waited for was late."""

    status = 504
    code = "answer_timeout"


class RoleRefused(GatewayError):
    """The backend does not verify, or does not draft. Never answered with something weaker."""

    status = 503
    code = "role_refused"


class BackendError(GatewayError):
    """The backend is at fault."""

    type = "backend_error"


class BackendUnavailable(BackendError):
    """It is not ready, or there is none to ask."""

    status = 503
    code = "backend_unavailable"


class BackendUnreachable(BackendUnavailable):
    """No connection to it could be made."""


class BackendTimeout(BackendError):
    """It took longer than allowed."""

    status = 504
    code = "backend_timeout"


class BackendFailed(BackendError):
    """It broke down, broke off, or cannot be understood."""

    status = 502
    code = "backend_failed"


class ProtocolViolation(BackendFailed):
    """Its answer breaks the window protocol; nothing of the answer is used."""

    code = "backend_protocol_violation"


class BackendRefused(BackendError):
    """It refused the call as ours to answer for; the client sees its status."""

    code = "backend_refused"

    def __init__(
        self, message: str, status: int, *, field: str | None = None, retry_after_s: str | None = None
    ) -> None:
        """`field` is the window protocol's name of what is at fault, which the client may never have written."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.field = field
        self.status = status
        self.type = "rate_limit_error" if status == 429 else "invalid_request_error"


class ClientLeft(Exception):
    """The client closed its connection; there is nobody to answer."""
