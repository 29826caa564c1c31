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
| `POST /v1/decode` | `DecodeRequest` | lines of `DecodeEvent` JSON (`application/x-ndjson`) |
| `POST /v1/stream` | `StreamRequest` | lines of `StreamEvent` JSON (`application/x-ndjson`) |
| `GET /healthz` | | `Health`; status 200 when ready, 503 before |
| `GET /metrics` | | Prometheus's text format; names are the backend's own |

Every status other than 2xx carries an `ErrorBody`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

PROTOCOL_VERSION = 1
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_GRAMMAR_BYTES = 64 << 10

Finish = Literal["stop", "length"]
Role = Literal["draft", "verify", "decode"]
"""Calls that a backend serves. Streams it serves always; who decodes also verifies."""
Batching = Literal["dynamic", "invariant", "none"]
"""How a stream shares passes with other requests.

- `dynamic`: with whoever is there, in the fast lane. Its bits depend on them.
- `invariant`: with whoever is there, in the fixed lane's arithmetic, as batch-invariant engines do for everybody.
- `none`: with nobody, in the fast lane: each of its passes has a batch of one.
"""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language that the generated text must belong to, from its first token to its last.

    "json_schema": `text` is a JSON object, a schema in the sense of draft 2020-12. The objects it describes are written
    with their properties in the order in which the schema lists them, so the order of its keys has a meaning.
    "regex": `text` is a regular expression in the syntax of Rust's regex crate, matched from beginning to end.

    Equal texts are equal grammars; a caller writes a schema in one form (no white space, keys in the order given).
    """

    kind: Literal["json_schema", "regex"]
    text: str

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text must not be empty")
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"text must have at most {MAX_GRAMMAR_BYTES} bytes")


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one token is chosen from its logits; with the seed and the position it fixes the choice.

    First the model's logits are adjusted, in this order, for greedy choice too:

    - `logit_bias`, pairs of token id and bias in ascending order of ids, is added.
    - `repetition_penalty` divides the logits above 0 of all tokens in the sequence so far, prompt and generated, and
      multiplies those of 0 or less. 1 does nothing.
    - `frequency_penalty` times the number of a token's occurrences among the generated ones is subtracted, then
      `presence_penalty` where there is any. A call's `generated` says how much of its context was generated.
    - While fewer than `min_tokens` tokens were generated, the call's `stop_ids` cannot be chosen.
    - Only tokens that the `grammar` allows behind the generated ones can be chosen. A stop id that stands for no text
      is allowed exactly where the grammar may end, one that stands for text where the grammar takes the text. Where
      only stop ids are allowed one is chosen, whatever `min_tokens` says. Behind generated tokens that are not of the
      grammar, which are never of an answer, everything is allowed.

    Then the filters apply in the order temperature, top_k, top_p, min_p, each on what the one before left. `top_k` 0
    means no limit. Temperature 0 takes the highest logit; ties go to the lowest token id throughout.

    All logprobs, logits and margins in answers are of the model's own logits, as they were before any of this.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the choice depends on more than logits, seed and position."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or self.grammar is not None
        )

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
        if not -MAX_PENALTY <= self.presence_penalty <= MAX_PENALTY:
            raise ValueError(f"presence_penalty must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
        if not -MAX_PENALTY <= self.frequency_penalty <= MAX_PENALTY:
            raise ValueError(f"frequency_penalty must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise ValueError(f"repetition_penalty must be above 0 and at most {MAX_REPETITION_PENALTY:g}")
        if self.min_tokens < 0:
            raise ValueError("min_tokens must be 0 or more")
        if self.logit_bias:
            _check_biases(self.logit_bias)


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
        _check_ids(self.stop_ids, "stop_ids")
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
    """Ask the verifier to replay `draft` after `context` and to add its own next token. The draft may be empty."""

    context: list[int]
    generated: int
    draft: list[int]
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _check_context(self.context, self.generated)
        _check_ids(self.draft, "draft")
        _check_ids(self.stop_ids, "stop_ids")
        _check_top(self.top_logprobs, "top_logprobs")


class VerifiedToken(msgspec.Struct, frozen=True):
    """A committed token with the verifier's logprobs, exact float32 values; `top` is best first, ties by lowest id."""

    id: int
    logprob: float
    top: list[ScoredToken] = []


class VerifyResponse(msgspec.Struct, frozen=True):
    """The tokens to commit: the `agreed` drafts and the verifier's own token, unless the sequence ends before it.

    `finish` is "stop" when the last token is in `stop_ids`, "length" when the context limit leaves no room for another;
    "stop" wins.

    The last two are the backend's advice. `wants_draft`: the next tokens cost less drafted and verified than in a
    decode call. `wants_draft_ahead`: while that one is verified, the draft of the window after it had better run
    already, although it is for nothing where the verifier then disagrees.
    """

    agreed: int
    tokens: list[VerifiedToken]
    finish: Finish | None
    fingerprint: str
    wants_draft: bool = True
    wants_draft_ahead: bool = False


class DecodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Have the verifier itself decode up to `max_tokens` after `context`, of which `generated` ids were generated.

    The tokens have the bits that drafting and verifying them would have given. A call that `yields` ends early, with
    `wants_draft`, where the rest costs less drafted and verified.
    """

    context: list[int]
    generated: int
    max_tokens: int
    yields: bool = False
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _check_context(self.context, self.generated)
        _check_ids(self.stop_ids, "stop_ids")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        _check_top(self.top_logprobs, "top_logprobs")


class DecodeEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a decode call: tokens that stand.

    The last line holds `finish`: "stop" when the last token is in `stop_ids`, else "length"; or `wants_draft`, which
    follows one token at least; or `error` where the call broke.
    """

    fingerprint: str
    tokens: list[VerifiedToken] = []
    finish: Finish | None = None
    wants_draft: bool = False
    error: ErrorDetail | None = None


class StreamRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stream up to `max_tokens` tokens after `context` as they are decoded, without verification.

    `batching` other than `dynamic` are the two ways to equal answers that engines without a verifier have.
    """

    context: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    top_logprobs: int = 0
    batching: Batching = "dynamic"

    def __post_init__(self) -> None:
        _check_context(self.context, 0)
        _check_ids(self.stop_ids, "stop_ids")
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


def _check_biases(biases: tuple[tuple[int, float], ...]) -> None:
    ids = [id_ for id_, _ in biases]
    if len(ids) > MAX_BIASES:
        raise ValueError(f"logit_bias must hold at most {MAX_BIASES} token ids")
    # One order, so that equal biases look equal.
    if ids[0] < 0 or any(left >= right for left, right in pairwise(ids)):
        raise ValueError("logit_bias must hold token ids of 0 or more, each once, in ascending order")
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in biases):
        raise ValueError(f"logit_bias must hold biases between {-MAX_BIAS:g} and {MAX_BIAS:g}")


def _check_context(context: list[int], generated: int) -> None:
    if not context:
        raise ValueError("context must hold at least one token id")
    _check_ids(context, "context")
    if not 0 <= generated < len(context):
        raise ValueError("generated must be at least 0 and below the length of context")


def _check_top(count: int, field: str) -> None:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{field} must be between 0 and {MAX_TOP_LOGPROBS}")
