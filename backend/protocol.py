"""Window protocol, version 1: the wire types between a gateway and a backend.

Owns the shape of every call and its validation against limits that need no model. Knows nothing of HTTP, asyncio or
torch, so that a gateway can import it without installing an engine.

Every call is stateless and content-addressed: it carries the whole context, so it is idempotent, can be repeated on
any replica with the same fingerprint, and leaves nothing behind when its caller dies. Bodies are JSON. Logprobs and
logits are float32 values written as JSON numbers with enough digits to be read back exactly.

| call | request | response |
|---|---|---|
| `GET /v1/info` | | `Info` |
| `GET /v1/tokenizer` | | `TokenizerFiles` |
| `POST /v1/draft` | `DraftRequest` | `DraftResponse` |
| `POST /v1/verify` | `VerifyRequest` | `VerifyResponse` |
| `POST /v1/stream` | `StreamRequest` | lines of `StreamEvent` JSON (`application/x-ndjson`) |
| `GET /healthz` | | `Health`; status 200 when ready, 503 before |

Every status other than 2xx carries an `ErrorBody`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)

Finish = Literal["stop", "length"]
Role = Literal["draft", "verify"]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one token is chosen from its logits; with the seed and the position it fixes the choice.

    The filters apply in the order temperature, top_k, top_p, min_p, each on what the one before left. `top_k` 0 means
    no limit. Temperature 0 takes the highest logit; ties go to the lowest token id throughout.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        # Written so that NaN fails every comparison.
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError("temperature must be between 0 and 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError("top_p must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError("top_k must be 0 (no limit) or more")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError("min_p must be between 0 and 1")
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise ValueError("seed must fit in a signed 64-bit integer")


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A token id with a score: a logit in drafts, a logprob in verified answers."""

    id: int
    score: float


class DraftRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the fast path for up to `count` tokens after `context`.

    The last `generated` ids of the context were generated. A draft ends early behind a token in `stop_ids` or at the
    context limit.
    """

    context: list[int]
    generated: int
    count: int
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    top_logits: int = 0

    def __post_init__(self) -> None:
        _check_context(self.context, self.generated)
        if self.count < 1:
            raise ValueError("count must be at least 1")
        _check_top(self.top_logits, "top_logits")


class DraftToken(msgspec.Struct, frozen=True):
    """A proposed token. `margin` is the top-1 logit minus the top-2 logit; `top` holds the top-k logits, best first."""

    id: int
    logprob: float
    margin: float
    top: list[ScoredToken] = []


class DraftResponse(msgspec.Struct, frozen=True):
    """The drafted window. It can be shorter than asked for, and empty only where no token fits."""

    tokens: list[DraftToken]
    fingerprint: str


class VerifyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the verifier to replay `draft` after `context` and to add its own next token. The draft may be empty.

    Behind its own token it decodes up to `extend` more by itself: they have the bits that drafting and verifying them
    would have given.
    """

    context: list[int]
    generated: int
    draft: list[int]
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    top_logprobs: int = 0
    extend: int = 0

    def __post_init__(self) -> None:
        _check_context(self.context, self.generated)
        _check_ids(self.draft, "draft")
        if self.extend < 0:
            raise ValueError("extend must be 0 or more")
        _check_top(self.top_logprobs, "top_logprobs")


class VerifiedToken(msgspec.Struct, frozen=True):
    """A committed token with the verifier's logprobs, exact float32 values; `top` is best first, ties by lowest id."""

    id: int
    logprob: float
    top: list[ScoredToken] = []


class VerifyResponse(msgspec.Struct, frozen=True):
    """The tokens to commit: the `agreed` drafts, the verifier's own token, and `extend` more, unless the sequence ends.

    `finish` is "stop" when the last token is in `stop_ids`, "length" when the context limit leaves no room for another;
    "stop" wins. `wants_draft` is the backend's advice for the next window: it costs less drafted and verified than
    asked for with `extend`. Fewer tokens than `extend` asked for are no error.
    """

    agreed: int
    tokens: list[VerifiedToken]
    finish: Finish | None
    fingerprint: str
    wants_draft: bool = True


class StreamRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stream up to `max_tokens` fast-path tokens after `context`: traffic without a guarantee."""

    context: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _check_context(self.context, 0)
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        _check_top(self.top_logprobs, "top_logprobs")


class StreamToken(msgspec.Struct, frozen=True):
    """A fast-path token; `top` holds the top-k logprobs, best first."""

    id: int
    logprob: float
    top: list[ScoredToken] = []


class StreamEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a stream: new tokens, then on the last line `finish`, or `error` where the stream broke."""

    tokens: list[StreamToken] = []
    finish: Finish | None = None
    error: ErrorDetail | None = None


class VerifyShape(msgspec.Struct, frozen=True):
    """The fixed shape of a verification pass: up to `groups` requests of up to `window` rows each.

    A window of W rows holds the last committed token and W - 1 drafts.
    """

    groups: int
    window: int


class Info(msgspec.Struct, frozen=True):
    """What a backend serves. Two backends with the same fingerprint give the same bits."""

    protocol: int
    model: str
    fingerprint: str
    roles: list[Role]
    verify: VerifyShape
    max_context: int
    vocab_size: int
    dtype: str
    device: str


class TokenizerFiles(msgspec.Struct, frozen=True):
    """All a gateway needs to turn messages into ids and ids into text.

    `tokenizer_json` is the Hugging Face tokenizers serialisation, `chat_template` a Jinja template (None where the
    model has none). `eos_ids` end a turn; `special_tokens` maps a role such as "bos_token" to its text.
    """

    tokenizer_json: str
    chat_template: str | None
    eos_ids: list[int]
    special_tokens: dict[str, str]


class Health(msgspec.Struct, frozen=True):
    """Liveness and start-up progress; `loaded` is the loaded share of the start-up work, 0 to 1."""

    status: Literal["loading", "ready"]
    loaded: float


class ErrorDetail(msgspec.Struct, frozen=True):
    """Why a call was refused or failed.

    `type` is one of "invalid_request" (400), "not_found" (404), "too_large" (413), "role_refused" (409),
    "overloaded" (429), "unavailable" (503) and "internal" (500). `field` names the offending request field as a path
    such as "sampling.top_p", and is None where no field is at fault.
    """

    type: str
    message: str
    field: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: ErrorDetail


def _check_ids(ids: list[int], field: str) -> None:
    if ids and min(ids) < 0:
        raise ValueError(f"{field} must hold token ids of 0 or more")


def _check_context(context: list[int], generated: int) -> None:
    if not context:
        raise ValueError("context must hold at least one token id")
    _check_ids(context, "context")
    if not 0 <= generated < len(context):
        raise ValueError("generated must be at least 0 and below the length of context")


def _check_top(count: int, field: str) -> None:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{field} must be between 0 and {MAX_TOP_LOGPROBS}")
