"""The decode-verify-rollback loop as a state machine without clock or I/O.

Theory of operation. The loop says which calls should be in flight (`pending`, at most one draft and one verification)
and is told what comes back. After each event its owner starts what is new in `pending` and cancels what has left it:

    start() ───────────────▶ Decode(prompt)                the verifier decodes by itself, where it can
                             Verify(prompt, ())            else the first token comes from the verifier alone
                             Verify(prompt, recorded)      where it is known what came out before
    on_decoded(decoded) ───▶ returns a Commit where tokens came; on the call's last event `finish` is set, or it says
                             that drafts cost less now, and a Draft is pending
    on_verdict(verdict) ───▶ returns a Commit; then `finish` is set, or one of these is pending
                               Draft(context, count)       propose the next window
                               Decode(context)             the verifier says that this is cheaper now
                               Verify(context, ())         a token at a time, where it does not decode: there is no
                                                           drafter, or no draft fits
    on_draft(ids) ─────────▶ Verify(context, draft)        and beside it, where the verifier's advice was so,
                               Draft(context + draft, ...) drafts ahead: the window after the one being verified
    on_drafter_lost() ─────▶ no draft is asked for any more; the verifier decodes by itself

A draft ahead supposes that all of the current draft will stand, and begins with a guess of the token that the verifier
will add of its own. The verdict decides: where both came true the rest of the draft is the next window; it is verified
at once, or awaited if still in flight. Where the verifier refused a token or went on otherwise, it is dropped, and
leaves `pending` at once if in flight. So there is at most one draft ahead, and none behind it. While windows still grow
nothing is drafted ahead: those windows are there to show text early, and are over soon.

A loop may begin behind tokens that are `committed` already, and have others `recorded`: what some log says comes next.
These are the best draft there is, and no more than a draft: they are verified in windows of full length, until they
are used up or the verifier goes on otherwise.

Only `on_verdict` and `on_decoded` add to the committed tokens, and they add only what the verifier returned; a draft
goes nowhere but into a verify command or the context of a draft, after it has been cut to what can be of use
(`_usable`). So no draft, whatever it holds, changes what is committed. Nor does it matter which of the two ways a token
comes: by the protocol both give the same bits. Each verdict adds at least one token, so does each decode call, and none
goes beyond `max_tokens`: so the loop ends.

An answer that breaks the window protocol raises `ProtocolViolation` and leaves the loop as it was: the same command may
be performed again elsewhere. Calls out of turn are our own bugs and fail an assertion.

Owns: the committed tokens, the window schedule's position, the counts. Does not know: tokens' text, stop strings (the
consumer just stops asking), where drafts come from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backend.protocol import Role
from gateway.domain import Commit, Counts, Finish, Job, Token
from gateway.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class Draft:
    """Propose up to `count` tokens after `context`, of which the last `generated` were generated."""

    context: tuple[int, ...]
    generated: int
    count: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Replay `draft` after `context` and add the verifier's own next token."""

    context: tuple[int, ...]
    generated: int
    draft: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode up to `count` tokens after `context` in the verifier itself; where it `yields`, until drafts cost less."""

    context: tuple[int, ...]
    generated: int
    count: int
    yields: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier answered, not yet believed. The last two are its advice for the windows to come."""

    agreed: int
    tokens: tuple[Token, ...]
    finish: Finish | None
    fingerprint: str
    wants_draft: bool = True
    wants_draft_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """An event of a decode call, not yet believed. On the last one either `finish` or `wants_draft` is set."""

    tokens: tuple[Token, ...]
    finish: Finish | None
    wants_draft: bool
    fingerprint: str


Command: TypeAlias = Draft | Verify | Decode


@dataclass(frozen=True, slots=True)
class Verifier:
    """What the answers of one verifier must match: who it is and which ids exist."""

    fingerprint: str
    vocab_size: int


class Loop:
    """One verified completion, with what `roles` are played. `finish` is None until the completion is complete."""

    def __init__(
        self,
        job: Job,
        windows: Sequence[int],
        verifier: Verifier,
        roles: Collection[Role],
        committed: Sequence[int] = (),
        recorded: Sequence[int] = (),
    ) -> None:
        """There must be more to come behind `committed`; `recorded` begins where that ends."""
        assert windows
        assert len(committed) < job.max_tokens
        assert not any(id_ in job.stop_ids for id_ in committed)
        self._job = job
        self._windows = tuple(windows)
        self._verifier = verifier
        self._drafts = "draft" in roles
        self._decodes = "decode" in roles
        self._drafts_ahead = False
        self._committed = list(committed)
        self._recorded = (*committed, *recorded)
        """What is known to come, from the first token on; empty once it is of no more use."""
        self._counts = Counts()
        self._verifying: Verify | None = None
        self._drafting: Draft | None = None
        self._decoding: Decode | None = None
        self._held: tuple[int, ...] | None = None
        """A draft ahead that came back before its verdict."""
        self._guessed: int | None = None
        """What the draft in flight has to begin with, where it was begun ahead of a verdict that has come since."""
        self.finish: Finish | None = None

    def __repr__(self) -> str:
        return (
            f"<Loop committed={len(self._committed)}/{self._job.max_tokens} {self._counts} pending={self.pending!r}"
            f" held={self._held} finish={self.finish}>"
        )

    @property
    def pending(self) -> tuple[Command, ...]:
        """The calls that should be in flight now: a verification, a draft, or both; or a decode call. None before the
        start and behind the finish. A command stays the same object for as long as it is pending."""
        calls = (self._verifying, self._drafting, self._decoding)
        return tuple(command for command in calls if command is not None)

    def start(self) -> None:
        """Ask for the first token."""
        assert not self.pending
        assert not self._counts.windows
        if not self._replay():
            self._go_alone()

    def on_draft(self, ids: Sequence[int]) -> None:
        """The pending draft came back as `ids`."""
        assert self._drafting is not None
        self._drafting = None
        if self._verifying is not None:
            self._held = tuple(ids)
        elif self._guessed is None:
            self._verify(self._usable(ids))
        else:
            guessed, self._guessed = self._guessed, None
            self._take_ahead(ids, guessed)

    def on_drafter_lost(self) -> None:
        """The pending draft will not come, and nor will another one: from now on the verifier decodes by itself."""
        assert self._drafting is not None
        self._drafting = None
        self._drafts = False
        if self._verifying is not None or self._guessed is not None:
            self._counts += Counts(ahead_dropped=1)
        self._guessed = None
        if self._verifying is None:
            self._next_window(wants_draft=False)

    def on_verdict(self, verdict: Verdict) -> Commit:
        """The pending verification came back: returns what now stands."""
        assert self._verifying is not None
        draft = self._verifying.draft
        self._check(self._verifying, verdict)
        self._committed += [token.id for token in verdict.tokens]
        rejected = len(draft) - verdict.agreed
        self._counts += Counts(windows=1, rollbacks=int(rejected > 0), rolled_back=rejected)
        self._verifying = None
        self._drafts_ahead = verdict.wants_draft_ahead
        room = self._job.max_tokens - len(self._committed)
        self.finish = verdict.finish or ("length" if room == 0 else None)
        self._go_on(verdict, all_stands=rejected == 0)
        return Commit(verdict.tokens, self._counts)

    def on_decoded(self, decoded: Decoded) -> Commit | None:
        """The pending decode call brought something: returns what now stands, None where that is nothing new."""
        assert self._decoding is not None
        self._check_decoded(self._decoding, decoded)
        if decoded.tokens:
            begun = len(self._committed) == self._decoding.generated
            self._committed += [token.id for token in decoded.tokens]
            self._counts += Counts(windows=int(begun))
        if decoded.finish is not None or decoded.wants_draft:
            self._decoding = None
            self.finish = decoded.finish
            if self.finish is None:
                self._next_window(wants_draft=True)
        return Commit(decoded.tokens, self._counts) if decoded.tokens else None

    def _go_on(self, verdict: Verdict, *, all_stands: bool) -> None:
        held, self._held = self._held, None
        if self.finish is None and all_stands and held is not None:
            self._take_ahead(held, verdict.tokens[-1].id, wants_draft=verdict.wants_draft)
        elif self.finish is None and all_stands and verdict.wants_draft and self._drafting is not None:
            self._guessed = verdict.tokens[-1].id
        else:
            if held is not None or self._drafting is not None:
                self._counts += Counts(ahead_dropped=1)
            self._drafting = None
            if self.finish is None:
                self._next_window(wants_draft=verdict.wants_draft)

    def _take_ahead(self, ids: Sequence[int], guessed: int, *, wants_draft: bool = True) -> None:
        """Verify a draft begun ahead, if it guessed the verifier's own token and holds more. It is there already, so
        the verifier's wish for none does not count."""
        draft = self._usable(ids[1:]) if ids and ids[0] == guessed else ()
        if draft:
            self._verify(draft)
        else:
            self._counts += Counts(ahead_dropped=1)
            self._next_window(wants_draft=wants_draft)

    def _replay(self) -> bool:
        """Verify what is recorded next, if anything is."""
        done, room = len(self._committed), self._job.max_tokens - len(self._committed)
        if self._recorded and self._recorded[:done] == tuple(self._committed):
            known = self._recorded[done:]
            if draft := self._possible(known[: min(self._windows[-1], room - 1)]):
                self._verify(draft)
                return True
        self._recorded = ()
        return False

    def _next_window(self, *, wants_draft: bool) -> None:
        if self._replay():
            return
        count = self._window()
        if count == 0 or not (self._drafts and wants_draft):
            self._go_alone()
        else:
            self._drafting = Draft(self._context(), len(self._committed), count)

    def _go_alone(self) -> None:
        """Ask the verifier without a draft."""
        if self._decodes:
            generated = len(self._committed)
            self._decoding = Decode(self._context(), generated, self._job.max_tokens - generated, self._drafts)
        else:
            self._verify(())

    def _verify(self, draft: tuple[int, ...]) -> None:
        self._verifying = Verify(self._context(), len(self._committed), draft)
        if not draft:
            return
        self._counts += Counts(drafted=len(draft))
        if (
            self._drafts
            and self._drafts_ahead
            and not self._recorded
            and self._counts.windows >= len(self._windows)
            and len(draft) == self._window()
        ):
            self._draft_ahead(self._verifying)

    def _draft_ahead(self, current: Verify) -> None:
        generated = current.generated + len(current.draft)
        # Of what is left, one token is the verifier's behind this window, and one behind the next.
        count = min(self._windows[-1], self._job.max_tokens - generated - 2)
        if count > 0 and current.draft[-1] not in self._job.stop_ids:
            self._drafting = Draft((*current.context, *current.draft), generated, 1 + count)
            self._counts += Counts(ahead=1)

    def _window(self) -> int:
        """How many tokens to draft next. The verifier adds one, so one less than there is room for is of use."""
        room = self._job.max_tokens - len(self._committed)
        # The prompt's own pass took no window.
        return min(self._windows[min(self._counts.windows, len(self._windows)) - 1], room - 1)

    def _context(self) -> tuple[int, ...]:
        return (*self._job.prompt, *self._committed)

    def _usable(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The part of a draft a verifier could agree with: in number, in vocabulary, not past the end of sequence."""
        return self._possible(ids[: self._window()])

    def _possible(self, ids: Sequence[int]) -> tuple[int, ...]:
        draft: list[int] = []
        for id_ in ids:
            if not 0 <= id_ < self._verifier.vocab_size:
                break
            draft.append(id_)
            if id_ in self._job.stop_ids:
                break
        return tuple(draft)

    def _check(self, asked: Verify, verdict: Verdict) -> None:
        draft = asked.draft
        ids = self._checked_ids(verdict.tokens, verdict.fingerprint)
        if not ids:
            raise ProtocolViolation("the verifier returned no token")
        if not 0 <= verdict.agreed <= len(draft):
            raise ProtocolViolation(f"the verifier agreed to {verdict.agreed} of {len(draft)} drafted tokens")
        if ids[: verdict.agreed] != draft[: verdict.agreed]:
            raise ProtocolViolation("the verifier returned other tokens than the drafts it agreed to")
        ended_in_draft = verdict.finish is not None and len(ids) == verdict.agreed
        if len(ids) != verdict.agreed + 1 and not ended_in_draft:
            raise ProtocolViolation(f"the verifier returned {len(ids)} tokens after agreeing to {verdict.agreed}")
        if (ids[-1] in self._job.stop_ids) != (verdict.finish == "stop"):
            raise ProtocolViolation(f"the verifier's finish is {verdict.finish!r} after token {ids[-1]}")

    def _check_decoded(self, asked: Decode, decoded: Decoded) -> None:
        ids = self._checked_ids(decoded.tokens, decoded.fingerprint)
        # An event brings a token or so: what came before is not looked through again.
        before = len(self._committed) - asked.generated
        had_ended = before > 0 and self._committed[-1] in self._job.stop_ids
        ended = ids[-1] in self._job.stop_ids if ids else had_ended
        came = before + len(ids)
        if came > asked.count or (ids and had_ended):
            raise ProtocolViolation("the verifier went on after the end of the sequence")
        if decoded.finish is not None and (not came or ended != (decoded.finish == "stop")):
            raise ProtocolViolation(f"the verifier's finish is {decoded.finish!r} after {came} tokens")
        if decoded.wants_draft and (decoded.finish is not None or ended or not came or not asked.yields):
            raise ProtocolViolation("the verifier wants a draft where none can be")

    def _checked_ids(self, tokens: tuple[Token, ...], fingerprint: str) -> tuple[int, ...]:
        """What every answer of a verifier has to be."""
        if fingerprint != self._verifier.fingerprint:
            raise ProtocolViolation(
                f"the verifier's fingerprint is {fingerprint!r}, expected {self._verifier.fingerprint!r}"
            )
        ids = tuple(token.id for token in tokens)
        if not all(0 <= id_ < self._verifier.vocab_size for id_ in ids):
            raise ProtocolViolation("the verifier returned a token id outside the vocabulary")
        if any(id_ in self._job.stop_ids for id_ in ids[:-1]):
            raise ProtocolViolation("the verifier went on after the end of the sequence")
        return ids
