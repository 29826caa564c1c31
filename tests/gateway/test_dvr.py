"""Whatever is drafted, what is committed is the verifier's own sequence, and every verdict makes progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.protocol import Sampling
from gateway.domain import Commit, Counts, Finish, Job, Token
from gateway.dvr import Command, Draft, Loop, Verdict, Verifier, Verify
from gateway.errors import ProtocolViolation

VERIFIER = Verifier("f", vocab_size=10)
EOS = 9


def job(max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2)) -> Job:
    return Job(prompt, Sampling(), max_tokens, (EOS,), 0)


@dataclass(frozen=True)
class Mood:
    """How far a verifier decodes by itself this time, and what it advises."""

    extends: int = 0
    wants_draft: bool = True
    wants_draft_ahead: bool = False


CALM = Mood()
AHEAD = Mood(wants_draft_ahead=True)


class Oracle:
    """A verifier with a fixed continuation: EOS where `text` ends, finish "length" at `context_limit`."""

    def __init__(self, text: Sequence[int], prompt: int, context_limit: int) -> None:
        self._text = text
        self._prompt = prompt
        self._limit = context_limit

    def token(self, generated: int) -> int:
        return self._text[generated] if generated < len(self._text) else EOS

    def answer(self, max_tokens: int) -> tuple[list[int], Finish]:
        out: list[int] = []
        while True:
            out.append(self.token(len(out)))
            if out[-1] == EOS:
                return out, "stop"
            if len(out) == max_tokens or self._prompt + len(out) == self._limit:
                return out, "length"

    def verify(self, command: Verify, mood: Mood) -> Verdict:
        """Decodes tokens behind its own by the mood, or as many as were asked for where those are fewer."""
        tokens: list[Token] = []
        finish: Finish | None = None
        agreed = 0
        agrees = True
        more = min(mood.extends, command.extend)
        for drafted in (*command.draft, *[None] * (1 + more)):
            id_ = self.token(command.generated + len(tokens))
            tokens.append(Token(id_, -0.5 * id_))
            agrees = agrees and id_ == drafted
            agreed += agrees
            if id_ == EOS:
                finish = "stop"
            elif self._prompt + command.generated + len(tokens) == self._limit:
                finish = "length"
            if finish or len(tokens) == agreed + 1 + more:
                break
        return Verdict(agreed, tuple(tokens), finish, VERIFIER.fingerprint, mood.wants_draft, mood.wants_draft_ahead)


def only(loop: Loop) -> Command:
    """The one call that should be in flight."""
    (command,) = loop.pending
    return command


def run(
    loop: Loop,
    oracle: Oracle,
    draft: Callable[[Draft], Sequence[int] | None],
    mood: Callable[[], Mood] = lambda: CALM,
    first: Callable[[], type[Command]] = lambda: Verify,
) -> tuple[list[int], Finish, Counts]:
    """Drive the loop to its end. `draft` None loses the drafter; `first` says which of two calls comes back first."""
    committed: list[int] = []
    counts = Counts()
    loop.start()
    while loop.finish is None:
        assert loop.pending
        assert len({type(command) for command in loop.pending}) == len(loop.pending) <= 2
        kind = first() if len(loop.pending) == 2 else type(loop.pending[0])
        (command,) = (command for command in loop.pending if type(command) is kind)
        if isinstance(command, Draft):
            if (ids := draft(command)) is None:
                loop.on_drafter_lost()
            else:
                loop.on_draft(ids)
        else:
            commit = loop.on_verdict(oracle.verify(command, mood()))
            assert len(commit.tokens) >= 1
            committed += [token.id for token in commit.tokens]
            counts = commit.counts
    assert loop.pending == ()
    return committed, loop.finish, counts


@given(
    data=st.data(),
    text=st.lists(st.integers(0, 8), max_size=40),
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    max_tokens=st.integers(1, 45),
    spare=st.integers(0, 45),
    windows=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    drafts=st.booleans(),
)
def test_any_drafter_any_windows(
    data: st.DataObject,
    text: list[int],
    prompt: list[int],
    max_tokens: int,
    spare: int,
    windows: list[int],
    drafts: bool,
) -> None:
    oracle = Oracle(text, len(prompt), len(prompt) + 1 + spare)
    loop = Loop(job(max_tokens, tuple(prompt)), windows, VERIFIER, drafts=drafts)
    drafted, lost = 0, False
    advised = CALM

    def draft(command: Draft) -> Sequence[int] | None:
        nonlocal drafted, lost
        assert not lost
        assert 1 <= command.count <= 1 + max(windows)
        assert command.generated + command.count < max_tokens
        assert command.context[: len(prompt)] == tuple(prompt)
        assert len(command.context) == len(prompt) + command.generated
        drafted += 1
        truth = [oracle.token(command.generated + i) for i in range(command.count)]
        wild = st.lists(st.integers(-3, 12), max_size=2 * command.count + 1)
        broken_at = st.integers(0, command.count)
        lost = data.draw(st.integers(0, 19), label="drafter lost at 0") == 0
        if lost:
            return None
        return data.draw(st.one_of(st.just(truth), wild, st.builds(lambda i, w: truth[:i] + w, broken_at, wild)))

    def mood() -> Mood:
        nonlocal advised
        # Asked for a verdict while a draft runs ahead of it: the verdict before allowed that.
        assert len(loop.pending) == 1 or advised.wants_draft_ahead
        advised = data.draw(st.builds(Mood, st.integers(0, 12), st.booleans(), st.booleans()))
        return advised

    committed, finish, counts = run(
        loop, oracle, draft, mood, lambda: data.draw(st.sampled_from([Draft, Verify]), label="first back")
    )
    assert drafts or drafted == 0
    assert (committed, finish) == oracle.answer(max_tokens)
    assert counts.windows <= len(committed)
    assert counts.rolled_back <= counts.drafted
    assert (counts.rollbacks > 0) == (counts.rolled_back > 0)
    assert counts.ahead_dropped <= counts.ahead


def test_one_token_needs_one_verification() -> None:
    loop = Loop(job(max_tokens=1), (8,), VERIFIER)
    loop.start()
    assert only(loop) == Verify((1, 2), 0, ())
    commit = loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f"))
    assert commit == Commit((Token(5, -1.0),), Counts(windows=1))
    assert (loop.pending, loop.finish) == ((), "length")


def test_windows_grow_and_never_reach_past_max_tokens() -> None:
    asked = []

    def draft(command: Draft) -> list[int]:
        asked.append(command.count)
        return [3] * command.count

    committed, finish, counts = run(Loop(job(30), (2, 4, 8), VERIFIER), Oracle([3] * 99, 2, 999), draft)
    # One token from the prompt, then windows of a draft and a token of the verifier's own; the last is cut to the room.
    assert asked == [2, 4, 8, 8, 2]
    assert (len(committed), finish) == (30, "length")
    assert counts == Counts(windows=6, drafted=24)


def test_a_verifier_that_wants_no_draft_is_asked_to_go_on_by_itself() -> None:
    loop = Loop(job(8), (4,), VERIFIER)
    loop.start()
    loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f", wants_draft=False))
    assert only(loop) == Verify((1, 2, 5), 1, (), extend=4)
    five = tuple(Token(3, -1.0) for _ in range(5))
    loop.on_verdict(Verdict(0, five, None, "f", wants_draft=False))
    assert only(loop) == Verify((1, 2, 5, 3, 3, 3, 3, 3), 6, (), extend=1), "it asks for no more than there is room for"
    with pytest.raises(ProtocolViolation):
        loop.on_verdict(Verdict(0, five[:3], None, "f"))
    commit = loop.on_verdict(Verdict(0, five[:2], None, "f"))
    assert (loop.pending, loop.finish) == ((), "length")
    assert commit.counts == Counts(windows=3), "a window decoded directly drafts nothing and rolls nothing back"


def test_a_verifier_that_goes_on_less_far_than_asked_only_makes_more_windows() -> None:
    loop = Loop(job(8), (4,), VERIFIER)
    loop.start()
    loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f", wants_draft=False))
    loop.on_verdict(Verdict(0, (Token(3, -1.0),), None, "f", wants_draft=False))
    assert only(loop) == Verify((1, 2, 5, 3), 2, (), extend=4)
    loop.on_verdict(Verdict(0, (Token(3, -1.0),), None, "f", wants_draft=True))
    assert only(loop) == Draft((1, 2, 5, 3, 3), 3, 4), "its advice counts each time anew"


def test_an_end_within_a_window_decoded_directly() -> None:
    loop = Loop(job(8), (4,), VERIFIER, drafts=False)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    assert only(loop) == Verify((1, 2, 5), 1, (), extend=4), "there is nobody to draft, whatever the verifier wants"
    with pytest.raises(ProtocolViolation, match="went on"):
        loop.on_verdict(verdict(0, [3, EOS, 3]))
    loop.on_verdict(verdict(0, [3, EOS], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")


def test_a_rejected_draft_is_counted_as_rolled_back() -> None:
    committed, _, counts = run(
        Loop(job(6), (4,), VERIFIER), Oracle([3] * 99, 2, 999), lambda c: [3, 4, 4, 4][: c.count]
    )
    assert committed == [3] * 6
    assert counts == Counts(windows=4, rollbacks=2, drafted=4 + 2, rolled_back=3 + 1)


@pytest.mark.parametrize(
    ("proposed", "used"),
    [
        ([3, 4], (3, 4)),
        ([], ()),
        ([3, 4, 5, 6, 7], (3, 4, 5)),
        ([3, 10, 4], (3,)),
        ([-1, 3], ()),
        ([3, EOS, 4], (3, EOS)),
    ],
)
def test_a_draft_is_cut_to_what_can_be_of_use(proposed: list[int], used: tuple[int, ...]) -> None:
    loop = Loop(job(9), (3,), VERIFIER)
    loop.start()
    loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f"))
    assert only(loop) == Draft((1, 2, 5), 1, 3)
    loop.on_draft(proposed)
    assert only(loop) == Verify((1, 2, 5), 1, used)


def verdict(
    agreed: int,
    ids: Sequence[int],
    finish: Finish | None = None,
    fingerprint: str = "f",
    wants_draft: bool = True,
    ahead: bool = False,
) -> Verdict:
    return Verdict(agreed, tuple(Token(id_, -1.0) for id_ in ids), finish, fingerprint, wants_draft, ahead)


BROKEN = {
    "fingerprint": verdict(1, [3, 5], fingerprint="g"),
    "no token": verdict(0, []),
    "no token at an end": verdict(0, [], "length"),
    "agreed to more than was drafted": verdict(4, [3, 4, 5, 6, 7]),
    "negative agreement": verdict(-1, []),
    "agreed to other tokens": verdict(2, [3, 5, 5]),
    "no token of its own": verdict(2, [3, 4]),
    "too many of its own": verdict(1, [3, 5, 5]),
    "fewer than agreed": verdict(3, [3, 4], "length"),
    "unknown id": verdict(1, [3, 10]),
    "went on after the end": verdict(0, [EOS, 5], "length"),
    "end not named": verdict(1, [3, EOS]),
    "end misnamed": verdict(1, [3, EOS], "length"),
    "end without end": verdict(1, [3, 5], "stop"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_verdict_changes_nothing(broken: Verdict) -> None:
    loop = Loop(job(9), (3,), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    loop.on_draft([3, 4, 4])
    command = only(loop)
    before = repr(loop)
    with pytest.raises(ProtocolViolation):
        loop.on_verdict(broken)
    assert repr(loop) == before
    assert only(loop) is command
    commit = loop.on_verdict(verdict(1, [3, 6]))
    assert [token.id for token in commit.tokens] == [3, 6]
    assert only(loop) == Draft((1, 2, 5, 3, 6), 3, 3)


def test_an_end_inside_the_draft_needs_no_further_token() -> None:
    loop = Loop(job(9), (3,), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    loop.on_draft([3, EOS])
    commit = loop.on_verdict(verdict(2, [3, EOS], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")
    assert commit.counts == Counts(windows=2, drafted=2)


def test_an_answer_that_goes_on_behind_an_end_in_the_draft_is_refused() -> None:
    loop = Loop(job(9), (3,), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    loop.on_draft([3, EOS])
    with pytest.raises(ProtocolViolation, match="went on"):
        loop.on_verdict(verdict(2, [3, EOS, 5]))


def test_calls_out_of_turn_are_our_bugs() -> None:
    loop = Loop(job(), (3,), VERIFIER)
    with pytest.raises(AssertionError):
        loop.on_draft([1])
    loop.start()
    with pytest.raises(AssertionError):
        loop.start()
    with pytest.raises(AssertionError):
        loop.on_draft([1])
    with pytest.raises(AssertionError):
        Loop(job(), (), VERIFIER)


def ahead_loop(max_tokens: int = 20) -> Loop:
    """A window of [3, 3] being verified after [1, 2, 5], the next one being drafted ahead."""
    loop = Loop(job(max_tokens), (2,), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5], ahead=True))
    assert only(loop) == Draft((1, 2, 5), 1, 2), "there is nothing yet to be ahead of"
    loop.on_draft([3, 3])
    assert loop.pending == (Verify((1, 2, 5), 1, (3, 3)), Draft((1, 2, 5, 3, 3), 3, 3))
    return loop


def test_a_draft_ahead_that_is_back_is_verified_at_once() -> None:
    loop = ahead_loop()
    loop.on_draft([4, 6, 7])
    assert only(loop) == Verify((1, 2, 5), 1, (3, 3))
    commit = loop.on_verdict(verdict(2, [3, 3, 4], ahead=True))
    assert loop.pending == (Verify((1, 2, 5, 3, 3, 4), 4, (6, 7)), Draft((1, 2, 5, 3, 3, 4, 6, 7), 6, 3))
    assert commit.counts == Counts(windows=2, drafted=4, ahead=2)


def test_a_draft_ahead_still_in_flight_is_awaited() -> None:
    loop = ahead_loop()
    _, drafting = loop.pending
    loop.on_verdict(verdict(2, [3, 3, 4], ahead=True))
    assert only(loop) is drafting, "the call goes on"
    loop.on_draft([4, 6, 7])
    assert loop.pending == (Verify((1, 2, 5, 3, 3, 4), 4, (6, 7)), Draft((1, 2, 5, 3, 3, 4, 6, 7), 6, 3))


def test_a_draft_ahead_in_flight_goes_as_soon_as_its_window_is_refused() -> None:
    loop = ahead_loop()
    commit = loop.on_verdict(verdict(1, [3, 8], ahead=True))
    assert only(loop) == Draft((1, 2, 5, 3, 8), 3, 2)
    assert commit.counts == Counts(windows=2, rollbacks=1, drafted=2, rolled_back=1, ahead=1, ahead_dropped=1)


def test_a_draft_ahead_that_is_back_goes_with_its_window() -> None:
    loop = ahead_loop()
    loop.on_draft([4, 6, 7])
    loop.on_verdict(verdict(1, [3, 8]))
    assert only(loop) == Draft((1, 2, 5, 3, 8), 3, 2)


@pytest.mark.parametrize("proposed", [[6, 4, 4], [4], []])
@pytest.mark.parametrize("first", [Draft, Verify])
def test_a_draft_ahead_that_guessed_wrong_or_holds_nothing_is_dropped(
    proposed: list[int], first: type[Command]
) -> None:
    loop = ahead_loop()
    if first is Draft:
        loop.on_draft(proposed)
        loop.on_verdict(verdict(2, [3, 3, 4]))
    else:
        loop.on_verdict(verdict(2, [3, 3, 4]))
        loop.on_draft(proposed)
    assert only(loop) == Draft((1, 2, 5, 3, 3, 4), 4, 2)
    loop.on_draft([6, 7])
    commit = loop.on_verdict(verdict(0, [9], "stop"))
    assert (commit.counts.ahead, commit.counts.ahead_dropped) == (1, 1)


def test_where_decoding_directly_is_cheaper_a_draft_in_flight_goes_and_one_that_is_back_is_used() -> None:
    loop = ahead_loop()
    loop.on_verdict(verdict(2, [3, 3, 4], wants_draft=False, ahead=True))
    assert only(loop) == Verify((1, 2, 5, 3, 3, 4), 4, (), extend=2)
    loop.on_verdict(verdict(0, [3, 3, 3], wants_draft=False, ahead=True))
    assert only(loop) == Verify((1, 2, 5, 3, 3, 4, 3, 3, 3), 7, (), extend=2), "nothing is drafted, ahead or not"
    loop = ahead_loop()
    loop.on_draft([4, 6, 7])
    loop.on_verdict(verdict(2, [3, 3, 4], wants_draft=False))
    assert only(loop) == Verify((1, 2, 5, 3, 3, 4), 4, (6, 7))


def test_nothing_is_drafted_ahead_while_windows_grow() -> None:
    loop = Loop(job(40), (1, 2), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5], ahead=True))
    loop.on_draft([3])
    assert only(loop) == Verify((1, 2, 5), 1, (3,))
    loop.on_verdict(verdict(1, [3, 3], ahead=True))
    loop.on_draft([4, 4])
    assert loop.pending == (Verify((1, 2, 5, 3, 3), 3, (4, 4)), Draft((1, 2, 5, 3, 3, 4, 4), 5, 3))


def test_a_draft_ahead_never_reaches_past_the_end() -> None:
    assert ahead_loop(max_tokens=7).pending[1] == Draft((1, 2, 5, 3, 3), 3, 3)
    for max_tokens, ahead in ((6, 1), (5, 0), (4, 0)):
        loop = Loop(job(max_tokens), (2,), VERIFIER)
        loop.start()
        loop.on_verdict(verdict(0, [5], ahead=True))
        loop.on_draft([3, 3])
        assert loop.pending[1:] == ((Draft((1, 2, 5, 3, 3), 3, 1 + ahead),) if ahead else ())
    loop = Loop(job(40), (2,), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5], ahead=True))
    loop.on_draft([3, EOS])
    assert only(loop) == Verify((1, 2, 5), 1, (3, EOS))


def test_the_end_drops_the_draft_ahead() -> None:
    loop = ahead_loop()
    commit = loop.on_verdict(verdict(1, [3, EOS], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")
    assert (commit.counts.ahead, commit.counts.ahead_dropped) == (1, 1)
