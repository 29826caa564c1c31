"""The settings a policy can make: each with its key in the file, its kind, what holds without it, and what it does.

Owns this table; the loader, the JSON Schema, the documentation and `resolve` all read it. A new setting is a new line
here and a use in the gateway: none is listed that the gateway does not obey.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from policies.kinds import Flag, Kind, Limited, Number, Patterns, Whole, Word, Words

T = TypeVar("T")

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


class Mode(StrEnum):
    """The guarantee of one response.

    `off` promises nothing; `verified` is bitwise reproducible. The other two are what the field does instead, to
    compare with: one arithmetic for everybody whose results do not depend on the batch, and no batch at all.
    """

    OFF = "off"
    VERIFIED = "verified"
    BATCH_INVARIANT = "batch_invariant"
    BATCH_OF_ONE = "batch_of_one"


class WithoutVerifier(StrEnum):
    """What becomes of a verified request while no verifier is there."""

    REFUSE = "refuse"
    DEGRADE = "degrade"


class CacheScope(StrEnum):
    """Whose answers a request may get out of the commit log."""

    NONE = "none"
    TENANT = "tenant"
    SHARED = "shared"


class ReceiptMode(StrEnum):
    """Which verified answers get a receipt."""

    ALWAYS = "always"
    ON_REQUEST = "on_request"
    NEVER = "never"


class ReceiptPrompt(StrEnum):
    """What a receipt holds of the prompt."""

    TOKENS = "tokens"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """One setting. `path` is its place in a section of the file, with dots between the levels."""

    path: str
    kind: Kind[T]
    built_in: T
    doc: str


MODE = Key("determinism.mode", Word(Mode), Mode.OFF, "What a request gets that asks for nothing.")
ALLOW = Key(
    "determinism.allow",
    Words(Mode),
    (Mode.OFF, Mode.VERIFIED),
    "The modes a request may ask for. The mode it gets anyway may always be asked for.",
)
NO_VERIFIER = Key(
    "determinism.no_verifier",
    Word(WithoutVerifier),
    WithoutVerifier.REFUSE,
    "While no verifier is there: refuse verified requests, or degrade them to off, labelled as such.",
)
SEED = Key(
    "seed.default", Whole(MIN_SEED, MAX_SEED), 42, "The seed of mode verified where the request's does not hold."
)
CLIENT_SEED = Key("seed.from_client", Flag(), True, "Whether a seed in the request counts.")
FIRST_WINDOW = Key("windows.first", Whole(1, 4096), 8, "Length of the first window; each next one is twice as long.")
LARGEST_WINDOW = Key(
    "windows.largest", Limited(), None, "Windows grow up to this length, and never beyond what the verifier takes."
)
ALLOWED_MODELS = Key("allowed_models", Patterns(), ("*",), "The models there are. Others do not exist for the request.")
REQUESTS_PER_MINUTE = Key("limits.requests_per_minute", Limited(), None, "Requests of a tenant in a minute.")
TOKENS_PER_MINUTE = Key(
    "limits.tokens_per_minute",
    Limited(),
    None,
    "Tokens of a tenant in a minute, prompts and answers. A request holds what it may use at most until it has ended.",
)
BURST_S = Key(
    "limits.burst_s",
    Number(0.1, 60),
    1.0,
    "How many seconds' worth of the limits per minute may be spent at once, and so exceed them at most.",
)
CONCURRENCY = Key("limits.concurrency", Limited(), None, "Choices of a tenant generated at a time.")
QUEUE_SHARE = Key(
    "limits.queue_share", Number(0.001, 1), 1.0, "The share of a gateway's places that a tenant may hold at a time."
)
MAX_TOKENS = Key("limits.max_tokens", Limited(), None, "The longest answer. One that names no length is this long.")
PROMPT_TOKENS = Key("limits.prompt_tokens", Limited(), None, "The longest prompt.")

CACHE_SCOPE = Key(
    "cache.scope",
    Word(CacheScope),
    CacheScope.NONE,
    "Who shares the commit log of verified answers: nobody, so that there is none; one tenant's requests; or the"
    " requests of all who have `shared` here.",
)
CACHE_READ = Key("cache.read", Flag(), True, "Whether answers may come out of the log.")
CACHE_WRITE = Key("cache.write", Flag(), True, "Whether answers are kept in the log.")
CACHE_TTL_S = Key("cache.ttl_s", Whole(1, 10**9), 86_400, "How many seconds a log is kept behind its last token.")
CACHE_TOKENS = Key("cache.max_tokens", Limited(), None, "How much of an answer is kept; what is behind it is not.")
CACHE_CONTROL = Key(
    "cache.from_client",
    Flag(),
    True,
    "Whether a request's `Cache-Control` counts: `no-cache` has its answer generated, `no-store` leaves no trace.",
)

RECEIPTS = Key(
    "receipts.mode",
    Word(ReceiptMode),
    ReceiptMode.NEVER,
    "Which verified answers get a signed receipt: all, those whose request has `X-Verbatim-Receipt: true`, or none.",
)
RECEIPT_TTL_S = Key(
    "receipts.ttl_s", Whole(1, 10**9), 30 * 86_400, "How many seconds a receipt is kept, to be fetched by its tenant."
)
RECEIPT_PROMPT = Key(
    "receipts.prompt",
    Word(ReceiptPrompt),
    ReceiptPrompt.TOKENS,
    "Whether a receipt holds the prompt's tokens, or their digest alone: then a replay needs the request.",
)


@dataclass(frozen=True, slots=True)
class SamplingKeys:
    """What a policy says of one sampling parameter."""

    default: Key[float]
    least: Key[float]
    most: Key[float]


LEAST_POSITIVE = 1e-6
"""Where a parameter must be above 0, what a policy may make it at least."""


def _sampling(name: str, least: float, most: float, built_in: float, *, positive: bool = False) -> SamplingKeys:
    lower, used = Number(least, most), Number(LEAST_POSITIVE if positive else least, most)
    return SamplingKeys(
        Key(
            f"sampling.{name}.default", used, float(built_in), "Where the request says nothing; moved into the bounds."
        ),
        Key(f"sampling.{name}.min", lower, float(least), "The least a request may ask for."),
        Key(f"sampling.{name}.max", used, float(most), "The most a request may ask for."),
    )


SAMPLING = {
    "temperature": _sampling("temperature", 0, 2, 1),
    "top_p": _sampling("top_p", 0, 1, 1, positive=True),
    "min_p": _sampling("min_p", 0, 1, 0),
    "presence_penalty": _sampling("presence_penalty", -2, 2, 0),
    "frequency_penalty": _sampling("frequency_penalty", -2, 2, 0),
    "repetition_penalty": _sampling("repetition_penalty", 0, 100, 1, positive=True),
}
"""By the name of the request's field. The bounds built in are the API's own."""

KEYS: tuple[Key[Any], ...] = (
    MODE,
    ALLOW,
    NO_VERIFIER,
    SEED,
    CLIENT_SEED,
    *(key for keys in SAMPLING.values() for key in (keys.default, keys.least, keys.most)),
    FIRST_WINDOW,
    LARGEST_WINDOW,
    ALLOWED_MODELS,
    REQUESTS_PER_MINUTE,
    TOKENS_PER_MINUTE,
    BURST_S,
    CONCURRENCY,
    QUEUE_SHARE,
    MAX_TOKENS,
    PROMPT_TOKENS,
    CACHE_SCOPE,
    CACHE_READ,
    CACHE_WRITE,
    CACHE_TTL_S,
    CACHE_TOKENS,
    CACHE_CONTROL,
    RECEIPTS,
    RECEIPT_TTL_S,
    RECEIPT_PROMPT,
)
"""All of them, in the order of the file and the documentation."""

Tree: TypeAlias = dict[str, "Key[Any] | Tree"]


def _tree() -> Tree:
    root: Tree = {}
    for key in KEYS:
        *groups, name = key.path.split(".")
        level = root
        for group in groups:
            below = level.setdefault(group, {})
            assert isinstance(below, dict)
            level = below
        level[name] = key
    return root


TREE = _tree()
"""The settings as a section of the file nests them."""
