"""Whatever is drafted, what is committed is the verifier's own sequence, and every verdict makes progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.protocol import Role, Sampling
from gateway.domain import Commit, Counts, Finish, Job, Token
from gateway.dvr import Command, Decode, Decoded, Draft, Loop, Verdict, Verifier, Verify
from gateway.errors import ProtocolViolation

VERIFIER = Verifier("f", vocab_size=10)
ROLES: tuple[Role, ...] = ("draft", "verify")
EOS = 9


def job(max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2)) -> Job:
    return Job(prompt, Sampling(), max_tokens, (EOS,), 0)


@dataclass(frozen=True)
class Mood:
    """How many tokens a verifier decodes at once, and what it advises."""

    chunk: int = 1
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
        tokens: list[Token] = []
        finish: Finish | None = None
        agreed = 0
        agrees = True
        for drafted in (*command.draft, None):
            id_ = self.token(command.generated + len(tokens))
            tokens.append(Token(id_, -0.5 * id_))
            agrees = agrees and id_ == drafted
            agreed += agrees
            if id_ == EOS:
                finish = "stop"
            elif self._prompt + command.generated + len(tokens) == self._limit:
                finish = "length"
            if finish or len(tokens) == agreed + 1:
                break
        return Verdict(agreed, tuple(tokens), finish, VERIFIER.fingerprint, mood.wants_draft, mood.wants_draft_ahead)

    def decode(self, command: Decode, mood: Callable[[], Mood]) -> Iterator[Decoded]:
        """Tokens in pieces by the mood, which also says when drafts would be better."""
        done = 0
        while True:
            now = mood()
            tokens: list[Token] = []
            finish: Finish | None = None
            while finish is None and len(tokens) < now.chunk:
                id_ = self.token(command.generated + done)
                tokens.append(Token(id_, -0.5 * id_))
                done += 1
                if id_ == EOS:
                    finish = "stop"
                elif done == command.count or self._prompt + command.generated + done == self._limit:
                    finish = "length"
            yield Decoded(tuple(tokens), None, False, VERIFIER.fingerprint)
            if finish is not None or (command.yields and now.wants_draft):
                yield Decoded((), finish, finish is None, VERIFIER.fingerprint)
                return


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
        elif isinstance(command, Decode):
            for decoded in oracle.decode(command, mood):
                assert loop.pending == (command,)
                stands = loop.on_decoded(decoded)
                assert (stands is not None) == bool(decoded.tokens)
                if stands is not None:
                    committed += [token.id for token in stands.tokens]
                    counts = stands.counts
            assert command not in loop.pending
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
    roles=st.sampled_from([("draft", "verify", "decode"), ("draft", "verify"), ("verify", "decode"), ("verify",)]),
)
def test_any_drafter_any_windows(
    data: st.DataObject,
    text: list[int],
    prompt: list[int],
    max_tokens: int,
    spare: int,
    windows: list[int],
    roles: tuple[Role, ...],
) -> None:
    oracle = Oracle(text, len(prompt), len(prompt) + 1 + spare)
    loop = Loop(job(max_tokens, tuple(prompt)), windows, VERIFIER, roles)
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
        advised = data.draw(st.builds(Mood, st.integers(1, 12), st.booleans(), st.booleans()))
        return advised

    committed, finish, counts = run(
        loop, oracle, draft, mood, lambda: data.draw(st.sampled_from([Draft, Verify]), label="first back")
    )
    assert "draft" in roles or drafted == 0
    assert (committed, finish) == oracle.answer(max_tokens)
    assert counts.windows <= len(committed)
    assert counts.rolled_back <= counts.drafted
    assert (counts.rollbacks > 0) == (counts.rolled_back > 0)
    assert counts.ahead_dropped <= counts.ahead


def test_one_token_needs_one_verification() -> None:
    loop = Loop(job(max_tokens=1), (8,), VERIFIER, ROLES)
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

    committed, finish, counts = run(Loop(job(30), (2, 4, 8), VERIFIER, ROLES), Oracle([3] * 99, 2, 999), draft)
    # One token from the prompt, then windows of a draft and a token of the verifier's own; the last is cut to the room.
    assert asked == [2, 4, 8, 8, 2]
    assert (len(committed), finish) == (30, "length")
    assert counts == Counts(windows=6, drafted=24)


def decoded(ids: Sequence[int], finish: Finish | None = None, wants_draft: bool = False) -> Decoded:
    return Decoded(tuple(Token(id_, -1.0) for id_ in ids), finish, wants_draft, "f")


def test_a_verifier_that_decodes_is_asked_to_from_the_start_until_drafts_cost_less() -> None:
    loop = Loop(job(8), (4,), VERIFIER, (*ROLES, "decode"))
    loop.start()
    assert only(loop) == Decode((1, 2), 0, 8, yields=True)
    command = only(loop)
    commit = loop.on_decoded(decoded([5]))
    assert commit == Commit((Token(5, -1.0),), Counts(windows=1))
    assert only(loop) is command, "the call goes on"
    assert loop.on_decoded(decoded([3, 3])) == Commit((Token(3, -1.0),) * 2, Counts(windows=1))
    assert loop.on_decoded(decoded([], wants_draft=True)) is None
    assert only(loop) == Draft((1, 2, 5, 3, 3), 3, 4)
    loop.on_draft([3])
    loop.on_verdict(verdict(1, [3, 4], wants_draft=False))
    assert only(loop) == Decode((1, 2, 5, 3, 3, 3, 4), 5, 3, yields=True), "and back, for all that there is room for"
    loop.on_decoded(decoded([3, 3, 3]))
    assert loop.on_decoded(decoded([], "length")) is None
    assert (loop.pending, loop.finish) == ((), "length")


def test_without_a_drafter_a_verifier_decodes_to_the_end() -> None:
    loop = Loop(job(8), (4,), VERIFIER, ("verify", "decode"))
    loop.start()
    assert only(loop) == Decode((1, 2), 0, 8, yields=False)
    loop.on_decoded(decoded([5, EOS]))
    loop.on_decoded(decoded([], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")


def test_a_verifier_alone_that_does_not_decode_is_asked_for_token_after_token() -> None:
    loop = Loop(job(8), (4,), VERIFIER, ("verify",))
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    assert only(loop) == Verify((1, 2, 5), 1, ()), "there is nobody to draft, whatever the verifier wants"
    loop.on_verdict(verdict(0, [EOS], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")


@pytest.mark.parametrize(
    ("before", "event", "said"),
    [
        ([], decoded([10]), "vocabulary"),
        ([], decoded([-1]), "vocabulary"),
        ([], decoded([EOS, 3]), "went on"),
        ([EOS], decoded([3]), "went on"),
        ([3, 3, 3], decoded([3, 3, 3]), "went on"),
        ([3], decoded([], "stop"), "finish is 'stop'"),
        ([3], decoded([EOS], "length"), "finish is 'length'"),
        ([], decoded([], "length"), "finish is 'length'"),
        ([], decoded([], wants_draft=True), "wants a draft"),
        ([EOS], decoded([], wants_draft=True), "wants a draft"),
        ([3], decoded([3], "length", wants_draft=True), "wants a draft"),
        ([3], Decoded((), None, False, "other"), "fingerprint"),
    ],
)
def test_a_decode_call_that_breaks_the_protocol_changes_nothing(before: list[int], event: Decoded, said: str) -> None:
    loop = Loop(job(5), (4,), VERIFIER, (*ROLES, "decode"))
    loop.start()
    if before:
        loop.on_decoded(decoded(before))
    state = repr(loop)
    with pytest.raises(ProtocolViolation, match=said):
        loop.on_decoded(event)
    assert repr(loop) == state


def test_a_decode_call_must_not_yield_unasked() -> None:
    loop = Loop(job(5), (4,), VERIFIER, ("verify", "decode"))
    loop.start()
    with pytest.raises(ProtocolViolation, match="wants a draft"):
        loop.on_decoded(decoded([3], wants_draft=True))


def test_a_rejected_draft_is_counted_as_rolled_back() -> None:
    committed, _, counts = run(
        Loop(job(6), (4,), VERIFIER, ROLES), Oracle([3] * 99, 2, 999), lambda c: [3, 4, 4, 4][: c.count]
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
    loop = Loop(job(9), (3,), VERIFIER, ROLES)
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
    loop = Loop(job(9), (3,), VERIFIER, ROLES)
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
    loop = Loop(job(9), (3,), VERIFIER, ROLES)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    loop.on_draft([3, EOS])
    commit = loop.on_verdict(verdict(2, [3, EOS], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")
    assert commit.counts == Counts(windows=2, drafted=2)


def test_an_answer_that_goes_on_behind_an_end_in_the_draft_is_refused() -> None:
    loop = Loop(job(9), (3,), VERIFIER, ROLES)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    loop.on_draft([3, EOS])
    with pytest.raises(ProtocolViolation, match="went on"):
        loop.on_verdict(verdict(2, [3, EOS, 5]))


def test_calls_out_of_turn_are_our_bugs() -> None:
    loop = Loop(job(), (3,), VERIFIER, ROLES)
    with pytest.raises(AssertionError):
        loop.on_draft([1])
    loop.start()
    with pytest.raises(AssertionError):
        loop.start()
    with pytest.raises(AssertionError):
        loop.on_draft([1])
    with pytest.raises(AssertionError):
        Loop(job(), (), VERIFIER, ROLES)


def ahead_loop(max_tokens: int = 20) -> Loop:
    """A window of [3, 3] being verified after [1, 2, 5], the next one being drafted ahead."""
    loop = Loop(job(max_tokens), (2,), VERIFIER, ROLES)
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
    assert only(loop) == Verify((1, 2, 5, 3, 3, 4), 4, ())
    loop.on_verdict(verdict(0, [3], wants_draft=False, ahead=True))
    assert only(loop) == Verify((1, 2, 5, 3, 3, 4, 3), 5, ()), "nothing is drafted, ahead or not"
    loop = ahead_loop()
    loop.on_draft([4, 6, 7])
    loop.on_verdict(verdict(2, [3, 3, 4], wants_draft=False))
    assert only(loop) == Verify((1, 2, 5, 3, 3, 4), 4, (6, 7))


def test_nothing_is_drafted_ahead_while_windows_grow() -> None:
    loop = Loop(job(40), (1, 2), VERIFIER, ROLES)
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
        loop = Loop(job(max_tokens), (2,), VERIFIER, ROLES)
        loop.start()
        loop.on_verdict(verdict(0, [5], ahead=True))
        loop.on_draft([3, 3])
        assert loop.pending[1:] == ((Draft((1, 2, 5, 3, 3), 3, 1 + ahead),) if ahead else ())
    loop = Loop(job(40), (2,), VERIFIER, ROLES)
    loop.start()
    loop.on_verdict(verdict(0, [5], ahead=True))
    loop.on_draft([3, EOS])
    assert only(loop) == Verify((1, 2, 5), 1, (3, EOS))


def test_the_end_drops_the_draft_ahead() -> None:
    loop = ahead_loop()
    commit = loop.on_verdict(verdict(1, [3, EOS], "stop"))
    assert (loop.pending, loop.finish) == ((), "stop")
    assert (commit.counts.ahead, commit.counts.ahead_dropped) == (1, 1)


# --- behind tokens that stand already --------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 8), max_size=14),
    st.integers(1, 14),
    st.data(),
    st.booleans(),
)
def test_it_goes_on_behind_what_is_committed_whatever_is_recorded(
    text: list[int], max_tokens: int, data: st.DataObject, decodes: bool
) -> None:
    whole, finish = Oracle(text, 2, 99).answer(max_tokens)
    done = data.draw(st.integers(0, len(whole) - 1))
    recorded = data.draw(st.just(whole[done:]) | st.lists(st.integers(0, 12), max_size=9))
    roles: tuple[Role, ...] = (*ROLES, "decode") if decodes else ROLES
    loop = Loop(job(max_tokens), (2, 4), VERIFIER, roles, whole[:done], recorded)
    moods = st.builds(Mood, st.integers(1, 3), st.booleans(), st.booleans())
    drafts = st.none() | st.lists(st.integers(0, 9), max_size=5)
    committed, ended, _ = run(loop, Oracle(text, 2, 99), lambda _: data.draw(drafts), lambda: data.draw(moods))
    assert (whole[:done] + committed, ended) == (whole, finish)


@pytest.mark.parametrize("roles", [ROLES, (*ROLES, "decode")])
def test_what_is_recorded_is_verified_in_full_windows_and_no_draft_is_asked_for(roles: tuple[Role, ...]) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    loop = Loop(job(9), (1, 2, 3), VERIFIER, roles, text[:1], text[1:])
    oracle = Oracle(text, 2, 99)
    loop.start()
    asked: list[Command] = []
    while loop.finish is None:
        command = only(loop)
        assert isinstance(command, Verify)
        asked.append(command)
        loop.on_verdict(oracle.verify(command, AHEAD))
    assert [command.draft for command in asked] == [(2, 3, 4), (6, 7, 8)]


def test_a_record_that_proves_wrong_is_of_no_more_use() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    loop = Loop(job(8), (3,), VERIFIER, ROLES, (), [1, 2, 2, 4, 5, 6, 7, 8])
    loop.start()
    command = only(loop)
    assert isinstance(command, Verify)
    loop.on_verdict(Oracle(text, 2, 99).verify(command, CALM))
    assert only(loop) == Draft((1, 2, 1, 2, 3), 3, 3)
