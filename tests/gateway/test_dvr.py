"""Whatever is drafted, what is committed is the verifier's own sequence, and every verdict makes progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.protocol import Sampling
from gateway.domain import Commit, Counts, Finish, Finished, Job, Token
from gateway.dvr import Command, Draft, Loop, Verdict, Verifier, Verify
from gateway.errors import ProtocolViolation

VERIFIER = Verifier("f", vocab_size=10)
EOS = 9


def job(max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2)) -> Job:
    return Job(prompt, Sampling(), max_tokens, (EOS,), 0)


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

    def verify(self, command: Verify, extends: int = 0, wants_draft: bool = True) -> Verdict:
        """Decodes `extends` tokens behind its own, or as many as were asked for where those are fewer."""
        tokens: list[Token] = []
        finish: Finish | None = None
        agreed = 0
        agrees = True
        more = min(extends, command.extend)
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
        return Verdict(agreed, tuple(tokens), finish, VERIFIER.fingerprint, wants_draft)


def run(
    loop: Loop,
    oracle: Oracle,
    draft: Callable[[Draft], Sequence[int]],
    mood: Callable[[], tuple[int, bool]] = lambda: (0, True),
) -> tuple[list[int], Finish, Counts]:
    """Drive the loop; `mood` says how far the verifier extends and whether it wants a draft next."""
    committed: list[int] = []
    counts = Counts()
    command: Command = loop.start()
    while not isinstance(command, Finished):
        if isinstance(command, Draft):
            command = loop.on_draft(draft(command))
        else:
            commit, command = loop.on_verdict(oracle.verify(command, *mood()))
            assert len(commit.tokens) >= 1
            committed += [token.id for token in commit.tokens]
            counts = commit.counts
    return committed, command.finish, counts


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
    drafted = 0

    def draft(command: Draft) -> Sequence[int]:
        nonlocal drafted
        assert 1 <= command.count <= max(windows)
        assert command.generated + command.count < max_tokens
        assert command.context[: len(prompt)] == tuple(prompt)
        assert len(command.context) == len(prompt) + command.generated
        drafted += 1
        truth = [oracle.token(command.generated + i) for i in range(command.count)]
        wild = st.lists(st.integers(-3, 12), max_size=2 * command.count + 1)
        broken_at = st.integers(0, command.count)
        return data.draw(st.one_of(st.just(truth), wild, st.builds(lambda i, w: truth[:i] + w, broken_at, wild)))

    def mood() -> tuple[int, bool]:
        return data.draw(st.tuples(st.integers(0, 12), st.booleans()))

    committed, finish, counts = run(loop, oracle, draft, mood)
    assert drafts or drafted == 0
    assert (committed, finish) == oracle.answer(max_tokens)
    assert counts.windows <= len(committed)
    assert counts.rolled_back <= counts.drafted
    assert (counts.rollbacks > 0) == (counts.rolled_back > 0)


def test_one_token_needs_one_verification() -> None:
    loop = Loop(job(max_tokens=1), (8,), VERIFIER)
    assert loop.start() == Verify((1, 2), 0, ())
    commit, command = loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f"))
    assert commit == Commit((Token(5, -1.0),), Counts(windows=1))
    assert command == Finished("length")


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
    _, command = loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f", wants_draft=False))
    assert command == Verify((1, 2, 5), 1, (), extend=4)
    five = tuple(Token(3, -1.0) for _ in range(5))
    _, command = loop.on_verdict(Verdict(0, five, None, "f", wants_draft=False))
    assert command == Verify((1, 2, 5, 3, 3, 3, 3, 3), 6, (), extend=1), "it asks for no more than there is room for"
    with pytest.raises(ProtocolViolation):
        loop.on_verdict(Verdict(0, five[:3], None, "f"))
    commit, command = loop.on_verdict(Verdict(0, five[:2], None, "f"))
    assert command == Finished("length")
    assert commit.counts == Counts(windows=3), "a window decoded directly drafts nothing and rolls nothing back"


def test_a_verifier_that_goes_on_less_far_than_asked_only_makes_more_windows() -> None:
    loop = Loop(job(8), (4,), VERIFIER)
    loop.start()
    loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f", wants_draft=False))
    _, command = loop.on_verdict(Verdict(0, (Token(3, -1.0),), None, "f", wants_draft=False))
    assert command == Verify((1, 2, 5, 3), 2, (), extend=4)
    _, command = loop.on_verdict(Verdict(0, (Token(3, -1.0),), None, "f", wants_draft=True))
    assert command == Draft((1, 2, 5, 3, 3), 3, 4), "its advice counts each time anew"


def test_an_end_within_a_window_decoded_directly() -> None:
    loop = Loop(job(8), (4,), VERIFIER, drafts=False)
    loop.start()
    _, command = loop.on_verdict(verdict(0, [5]))
    assert command == Verify((1, 2, 5), 1, (), extend=4), "there is nobody to draft, whatever the verifier wants"
    with pytest.raises(ProtocolViolation, match="went on"):
        loop.on_verdict(verdict(0, [3, EOS, 3]))
    _, command = loop.on_verdict(verdict(0, [3, EOS], "stop"))
    assert command == Finished("stop")


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
    _, command = loop.on_verdict(Verdict(0, (Token(5, -1.0),), None, "f"))
    assert command == Draft((1, 2, 5), 1, 3)
    assert loop.on_draft(proposed) == Verify((1, 2, 5), 1, used)


def verdict(agreed: int, ids: Sequence[int], finish: Finish | None = None, fingerprint: str = "f") -> Verdict:
    return Verdict(agreed, tuple(Token(id_, -1.0) for id_ in ids), finish, fingerprint)


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
    command = loop.on_draft([3, 4, 4])
    before = repr(loop)
    with pytest.raises(ProtocolViolation):
        loop.on_verdict(broken)
    assert repr(loop) == before
    commit, after = loop.on_verdict(verdict(1, [3, 6]))
    assert [token.id for token in commit.tokens] == [3, 6]
    assert after == Draft((1, 2, 5, 3, 6), 3, 3)
    assert command.draft == (3, 4, 4)


def test_an_end_inside_the_draft_needs_no_further_token() -> None:
    loop = Loop(job(9), (3,), VERIFIER)
    loop.start()
    loop.on_verdict(verdict(0, [5]))
    loop.on_draft([3, EOS])
    commit, command = loop.on_verdict(verdict(2, [3, EOS], "stop"))
    assert command == Finished("stop")
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
