"""Which guarantee a request gets: a pure function of a policy and of what the request says.

Owns the defaults (mode, seed, growth of the windows) and what a request may override. Knows nothing of HTTP bodies,
tenants or backends beyond the few facts handed in. A policy is a value: reading one from a file only has to build
another `Policy`.

The body and the header are equals. Neither wins: a request whose two voices differ is refused, because whichever were
obeyed, somebody would hold an answer with a guarantee other than the one they asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BODY_FIELD = "is_deterministic"
HEADER = "X-Verbatim-Determinism"


class Mode(StrEnum):
    """The guarantee of one response. `off` promises nothing; `verified` is bitwise reproducible."""

    OFF = "off"
    VERIFIED = "verified"


class PolicyError(ValueError):
    """A request asks for what no policy can give; `field` names the body field or header at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Policy:
    """What holds for a request that asks for nothing, and how windows grow. `default_seed` is for mode verified."""

    default_mode: Mode = Mode.OFF
    default_seed: int = 42
    first_window: int = 8


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What one request says about determinism; None where it says nothing. `header` is the header's raw value."""

    is_deterministic: bool | None = None
    header: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request gets.

    `seed` None asks for one to be drawn: who asks for nothing expects another answer each time. `windows` are lengths
    in order, of drafts or of what the verifier decodes by itself; the last one repeats. They never change the result.
    """

    mode: Mode
    seed: int | None
    windows: tuple[int, ...]


def resolve(policy: Policy, facts: RequestFacts, max_draft: int) -> Decision:
    """Decide for one request. `max_draft` is the longest draft the verifier takes in one pass, 0 for none."""
    mode = _mode(policy, facts)
    default_seed = policy.default_seed if mode is Mode.VERIFIED else None
    return Decision(
        mode=mode,
        seed=default_seed if facts.seed is None else facts.seed,
        windows=window_schedule(policy.first_window, max_draft),
    )


def window_schedule(first: int, max_draft: int) -> tuple[int, ...]:
    """Draft lengths that double from `first` up to `max_draft`: text comes early, long answers run at full window."""
    assert first >= 1
    assert max_draft >= 0
    windows = []
    size = first
    while size < max_draft:
        windows.append(size)
        size *= 2
    return (*windows, max_draft)


def _mode(policy: Policy, facts: RequestFacts) -> Mode:
    asked_by_header = None if facts.header is None else _parse_header(facts.header)
    if facts.is_deterministic is None:
        return asked_by_header or policy.default_mode
    asked_by_body = Mode.VERIFIED if facts.is_deterministic else Mode.OFF
    if asked_by_header is not None and asked_by_header is not asked_by_body:
        raise PolicyError(f"the body asks for mode {asked_by_body} but {HEADER} says {asked_by_header}", BODY_FIELD)
    return asked_by_body


def _parse_header(value: str) -> Mode:
    try:
        return Mode(value.strip().lower())
    except ValueError:
        raise PolicyError(f"{HEADER} must be 'verified' or 'off'", HEADER) from None
