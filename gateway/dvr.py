"""The decode-verify-rollback loop as a state machine without clock or I/O.

Theory of operation. The loop hands out one command at a time and is told the outcome:

    start() ──────────────▶ Verify(prompt, ())             the first token comes from the verifier alone
    on_verdict(verdict) ──▶ Commit, then one of
                              Draft(context, count)        propose the next window
                              Verify(context, (), extend)  the verifier decodes the next window itself: it says that
                                                           this is cheaper now, there is no drafter, or no draft fits
                              Finished(finish)
    on_draft(ids) ────────▶ Verify(context, draft)

Only `on_verdict` adds to the committed tokens, and it adds only what the verifier returned; a draft goes nowhere but
into a verify command, after it has been cut to what can be of use (`_usable`). So no draft, whatever it holds, changes
what is committed. Nor does it matter which of the two ways a window goes: by the protocol both give the same bits.
Each verdict adds at least one token and none beyond `max_tokens`, so the loop ends. A verifier that decodes fewer
tokens by itself than it was asked for only makes for more windows.

A verdict that breaks the window protocol raises `ProtocolViolation` and leaves the loop as it was: the same command may
be performed again elsewhere. Calls out of turn are our own bugs and fail an assertion.

Owns: the committed tokens, the window schedule's position, the counts. Does not know: tokens' text, stop strings (the
consumer just stops asking), where drafts come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gateway.domain import Commit, Counts, Finish, Finished, Job, Token
from gateway.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class Draft:
    """Propose up to `count` tokens after `context`, of which the last `generated` were generated."""

    context: tuple[int, ...]
    generated: int
    count: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Replay `draft` after `context` and add the verifier's own next token, then up to `extend` more."""

    context: tuple[int, ...]
    generated: int
    draft: tuple[int, ...]
    extend: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier answered, not yet believed."""

    agreed: int
    tokens: tuple[Token, ...]
    finish: Finish | None
    fingerprint: str
    wants_draft: bool = True


Command: TypeAlias = Draft | Verify | Finished


@dataclass(frozen=True, slots=True)
class Verifier:
    """What the answers of one verifier must match: who it is and which ids exist."""

    fingerprint: str
    vocab_size: int


class Loop:
    """One verified completion. Without `drafts` there is no drafter, and the verifier decodes every window itself."""

    def __init__(self, job: Job, windows: Sequence[int], verifier: Verifier, *, drafts: bool = True) -> None:
        assert windows
        self._job = job
        self._windows = tuple(windows)
        self._verifier = verifier
        self._drafts = drafts
        self._committed: list[int] = []
        self._counts = Counts()
        self._pending: Command | None = None

    def __repr__(self) -> str:
        return (
            f"<Loop committed={len(self._committed)}/{self._job.max_tokens} {self._counts} pending={self._pending!r}>"
        )

    def start(self) -> Verify:
        """The first command."""
        assert self._pending is None
        return self._verify(())

    def on_draft(self, ids: Sequence[int]) -> Verify:
        """The pending draft came back as `ids`."""
        assert isinstance(self._pending, Draft)
        draft = self._usable(ids, self._pending.count)
        self._counts += Counts(drafted=len(draft))
        return self._verify(draft)

    def on_verdict(self, verdict: Verdict) -> tuple[Commit, Command]:
        """The pending verification came back: what now stands, and what to do next."""
        assert isinstance(self._pending, Verify)
        draft = self._pending.draft
        self._check(self._pending, verdict)
        self._committed += [token.id for token in verdict.tokens]
        rejected = len(draft) - verdict.agreed
        self._counts += Counts(windows=1, rollbacks=int(rejected > 0), rolled_back=rejected)
        self._pending = self._after(verdict)
        return Commit(verdict.tokens, self._counts), self._pending

    def _after(self, verdict: Verdict) -> Command:
        if verdict.finish is not None:
            return Finished(verdict.finish)
        room = self._job.max_tokens - len(self._committed)
        if room == 0:
            return Finished("length")
        # The verifier adds a token of its own, so one less is worth drafting. The prompt's own pass took no window.
        count = min(self._windows[min(self._counts.windows, len(self._windows)) - 1], room - 1)
        if count == 0 or not (self._drafts and verdict.wants_draft):
            return self._verify((), extend=count)
        return Draft(self._context(), len(self._committed), count)

    def _verify(self, draft: tuple[int, ...], extend: int = 0) -> Verify:
        command = Verify(self._context(), len(self._committed), draft, extend)
        self._pending = command
        return command

    def _context(self) -> tuple[int, ...]:
        return (*self._job.prompt, *self._committed)

    def _usable(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
        """The part of a draft a verifier could agree with: in number, in vocabulary, not past the end of sequence."""
        draft: list[int] = []
        for id_ in ids[:count]:
            if not 0 <= id_ < self._verifier.vocab_size:
                break
            draft.append(id_)
            if id_ in self._job.stop_ids:
                break
        return tuple(draft)

    def _check(self, asked: Verify, verdict: Verdict) -> None:
        draft = asked.draft
        if verdict.fingerprint != self._verifier.fingerprint:
            raise ProtocolViolation(
                f"the verifier's fingerprint is {verdict.fingerprint!r}, expected {self._verifier.fingerprint!r}"
            )
        ids = tuple(token.id for token in verdict.tokens)
        if not ids:
            raise ProtocolViolation("the verifier returned no token")
        if not 0 <= verdict.agreed <= len(draft):
            raise ProtocolViolation(f"the verifier agreed to {verdict.agreed} of {len(draft)} drafted tokens")
        if ids[: verdict.agreed] != draft[: verdict.agreed]:
            raise ProtocolViolation("the verifier returned other tokens than the drafts it agreed to")
        if not all(0 <= id_ < self._verifier.vocab_size for id_ in ids):
            raise ProtocolViolation("the verifier returned a token id outside the vocabulary")
        ended_in_draft = verdict.finish is not None and len(ids) == verdict.agreed
        own = len(ids) - verdict.agreed
        if not 1 <= own <= 1 + asked.extend and not ended_in_draft:
            raise ProtocolViolation(f"the verifier returned {len(ids)} tokens after agreeing to {verdict.agreed}")
        if any(id_ in self._job.stop_ids for id_ in ids[:-1]):
            raise ProtocolViolation("the verifier went on after the end of the sequence")
        if (ids[-1] in self._job.stop_ids) != (verdict.finish == "stop"):
            raise ProtocolViolation(f"the verifier's finish is {verdict.finish!r} after token {ids[-1]}")
