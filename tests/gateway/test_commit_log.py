"""The key of a log, its entries, and what may be done to it."""

from __future__ import annotations

import base64
import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from toy_model import float32

from backend.protocol import Grammar, Sampling
from gateway.commit_log.key import FIELDS, InKey, View, log_key
from gateway.commit_log.memory import LOG_BYTES, PIECE_BYTES, PIECES, Conflict, Gap, MemoryLogs
from gateway.commit_log.packing import Unreadable, agree, known, pack, unpack
from gateway.commit_log.sealing import HEAD, Block, Checked, Damaged, Encrypted, Foreign, Sealer
from gateway.domain import Completion, Job, Scored, Token
from gateway.operator_keys import read_keys

KEY = bytes(range(32))
JOB = Job((1, 2), Sampling(), 5, (9, 8), 0)


# --- the key ---------------------------------------------------------------------------------------------------------


def fields_of(type_: type) -> set[str]:
    if issubclass(type_, msgspec.Struct):
        return set(type_.__struct_fields__)
    return {field.name for field in dataclasses.fields(type_)}


@pytest.mark.parametrize("type_", [Completion, Job, Sampling, Grammar])
def test_every_field_is_classified_with_a_reason(type_: type) -> None:
    assert set(FIELDS[type_]) == fields_of(type_)
    assert all(field.why for field in FIELDS[type_].values())


CHANGES: dict[type, dict[str, Any]] = {
    Job: {
        "prompt": (1, 2, 3),
        "sampling": Sampling(seed=1),
        "stop_ids": (9,),
        "max_tokens": 6,
        "top_logprobs": 3,
    },
    Sampling: {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 1,
        "min_p": 0.5,
        "seed": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 0.5,
        "logit_bias": ((1, 0.5),),
        "min_tokens": 1,
        "grammar": Grammar("regex", "a"),
    },
    Grammar: {"kind": "json_schema", "text": "b"},
}


def changed(type_: type, name: str) -> tuple[Job, Job]:
    """Two jobs that differ in one field."""
    value = CHANGES[type_][name]
    if type_ is Job:
        return JOB, dataclasses.replace(JOB, **{name: value})
    if type_ is Sampling:
        return JOB, dataclasses.replace(JOB, sampling=msgspec.structs.replace(Sampling(), **{name: value}))
    grammar = Grammar("regex", "a")
    jobs = (
        dataclasses.replace(JOB, sampling=Sampling(grammar=g))
        for g in (grammar, msgspec.structs.replace(grammar, **{name: value}))
    )
    before, after = jobs
    return before, after


@pytest.mark.parametrize(("type_", "name"), [(type_, name) for type_ in CHANGES for name in FIELDS[type_]])
def test_fields_in_the_key_change_it_and_views_do_not(type_: type, name: str) -> None:
    before, after = changed(type_, name)
    assert before != after
    in_key = isinstance(FIELDS[type_][name], InKey)
    assert (log_key("t", "f", before) != log_key("t", "f", after)) == in_key


def test_what_is_no_field_of_a_job_is_in_the_key() -> None:
    assert isinstance(FIELDS[Completion]["fingerprint"], InKey)
    assert all(isinstance(field, View) for name, field in FIELDS[Completion].items() if name != "fingerprint")
    keys = {log_key("t", "f", JOB), log_key("u", "f", JOB), log_key(None, "f", JOB), log_key("t", "g", JOB)}
    assert len(keys) == 4
    assert log_key("tf", "x", JOB) != log_key("t", "fx", JOB)
    assert log_key("", "f", JOB) != log_key(None, "f", JOB)


def test_one_value_has_one_form() -> None:
    def key(job: Job) -> bytes:
        return log_key("t", "f", job)

    def sampled(**fields: Any) -> Job:
        return dataclasses.replace(JOB, sampling=Sampling(**fields))

    assert key(sampled(temperature=0)) == key(sampled(temperature=0.0))
    assert key(sampled(presence_penalty=-0.0)) == key(sampled(presence_penalty=0.0))
    assert key(sampled(temperature=1.0)) == key(JOB), "what is left out is its default"
    assert key(dataclasses.replace(JOB, stop_ids=(8, 9, 9))) == key(JOB)


GRAMMARS = st.none() | st.builds(Grammar, st.sampled_from(["regex", "json_schema"]), st.text(min_size=1, max_size=4))
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.integers(0, 2),
    seed=st.integers(0, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1.0, 2.0])), max_size=2, unique_by=lambda p: p[0])
    .map(sorted)
    .map(tuple),
    grammar=GRAMMARS,
)
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
PARTS = st.tuples(
    st.text(max_size=2), st.text(max_size=2), IDS, SAMPLINGS, IDS.map(sorted).map(lambda ids: (*dict.fromkeys(ids),))
)


@given(PARTS, PARTS)
def test_keys_are_equal_only_for_equal_parts(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    def key(parts: tuple[Any, ...]) -> bytes:
        tenant, fingerprint, prompt, sampling, stop_ids = parts
        return log_key(tenant, fingerprint, Job(prompt, sampling, 4, stop_ids, 0))

    assert (key(one) == key(other)) == (one == other)


# --- packed tokens and their blocks ---------------------------------------------------------------------------------

LOGPROBS = st.floats(-50, 0, width=32) | st.floats(allow_nan=False)
IDS_OF_TOKENS = st.integers(0, 2**16) | st.integers(0, 2**32 - 1)
SCORED = st.builds(Scored, IDS_OF_TOKENS, LOGPROBS)
TOKENS = st.builds(Token, IDS_OF_TOKENS, LOGPROBS, st.lists(SCORED, max_size=3).map(tuple))
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=6)
SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))
SEALERS = [Checked(), Encrypted([SECRET])]


@given(SEQUENCES)
def test_packed_tokens_read_back_bit_for_bit(tokens: list[Token]) -> None:
    assert repr(unpack(pack(tokens), len(tokens))) == repr(tokens)


def test_packed_tokens_take_what_they_need() -> None:
    narrow, half = Token(9, -0.5), float32(-0.1)
    assert len(pack([narrow] * 10)) == 1 + 10 * 6
    assert len(pack([Token(70_000, half)] * 10)) == 1 + 10 * 8
    assert len(pack([Token(9, -0.1)] * 10)) == 1 + 10 * 10
    assert len(pack([Token(9, half, (Scored(1, half),))] * 10)) == 1 + 10 * (6 + 1 + 6)


@given(st.binary(max_size=60), st.integers(1, 9))
def test_what_is_not_packed_is_unreadable_or_tokens(noise: bytes, count: int) -> None:
    try:
        tokens = unpack(noise, count)
    except Unreadable:
        return
    assert len(tokens) == count


@pytest.mark.parametrize("sealer", SEALERS)
@given(tokens=SEQUENCES, position=st.integers(0, 2**31))
def test_a_block_reads_back_bit_for_bit(sealer: Sealer, tokens: list[Token], position: int) -> None:
    block = Block(position, tokens)
    sealed = sealer.seal(KEY, block)
    assert repr(sealer.open(KEY, sealed)) == repr(block)
    assert HEAD.unpack_from(sealed)[1:] == (position, len(tokens))


@pytest.mark.parametrize("sealer", SEALERS)
@given(tokens=SEQUENCES, position=st.integers(0, 100), data=st.data())
def test_a_damaged_block_is_seen(sealer: Sealer, tokens: list[Token], position: int, data: st.DataObject) -> None:
    sealed = sealer.seal(KEY, Block(position, tokens))
    moved = HEAD.pack(sealed[0], position + 1, len(tokens)) + sealed[HEAD.size :]
    damages: list[Callable[[], tuple[bytes, bytes]]] = [
        lambda: (KEY, flip(sealed, data.draw(st.integers(0, 8 * len(sealed) - 1)))),
        lambda: (KEY, sealed[: data.draw(st.integers(0, len(sealed) - 1))]),
        lambda: (KEY, moved),
        lambda: (KEY[::-1], sealed),
        lambda: (KEY, sealed + b"x"),
    ]
    with pytest.raises((Damaged, Foreign)):
        sealer.open(*data.draw(st.sampled_from(damages))())


def flip(block: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if index == bit // 8 else 0) for index, byte in enumerate(block))


def test_keys_can_be_changed_while_blocks_stand() -> None:
    block = Block(3, [Token(1, -1.0)])
    before, between, after = Encrypted([SECRET]), Encrypted([OTHER_SECRET, SECRET]), Encrypted([OTHER_SECRET])
    old, new = before.seal(KEY, block), between.seal(KEY, block)
    assert before.open(KEY, old) == between.open(KEY, old) == between.open(KEY, new) == after.open(KEY, new) == block
    for sealer, sealed in ((before, new), (after, old), (Checked(), old), (before, Checked().seal(KEY, block))):
        with pytest.raises(Foreign):
            sealer.open(KEY, sealed)


def test_equal_blocks_look_different_and_hide_their_tokens() -> None:
    sealer, tokens = Encrypted([SECRET]), [Token(7, -1.0)] * 64
    one, other = (sealer.seal(KEY, Block(0, tokens)) for _ in range(2))
    assert one[HEAD.size + 4 :] != other[HEAD.size + 4 :]
    assert pack(tokens)[1:9] not in one
    assert SECRET.hex() not in repr(sealer)


@pytest.mark.parametrize("text", ["", "AAAA", "!", f"{base64.b64encode(SECRET).decode()},"])
def test_what_is_no_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ValueError) as error:
        read_keys(text)
    assert not text or text not in str(error.value)


def test_keys_are_read() -> None:
    text = ", ".join(base64.b64encode(secret).decode() for secret in (SECRET, OTHER_SECRET))
    assert read_keys(text) == (SECRET, OTHER_SECRET)


def test_tokens_agree_up_to_the_alternatives_that_both_name() -> None:
    a, b, c = Scored(1, -1.0), Scored(2, -2.0), Scored(3, -2.0)
    assert agree(Token(1, -1.0), Token(1, -1.0, (a, b)))
    assert agree(Token(1, -1.0, (a, b)), Token(1, -1.0, (a,)))
    assert not agree(Token(1, -1.0), Token(2, -1.0))
    assert not agree(Token(1, -1.0), Token(1, -1.0000001))
    assert not agree(Token(1, -1.0, (a, b)), Token(1, -1.0, (a, c)))
    tokens = [Token(1, -1.0, (a, b)), Token(1, -1.0, (a,)), Token(1, -1.0, (a, b))]
    assert [known(tokens, top) for top in (0, 1, 2, 3)] == [3, 3, 1, 0]


# --- the log ---------------------------------------------------------------------------------------------------------


def truth(position: int, top: int = 0) -> Token:
    """What the one right sequence has at a position."""
    return Token(position % 7, float32(-position / 3), tuple(Scored(i, float32(-i / 7)) for i in range(top)))


def wrong(position: int) -> Token:
    return msgspec.structs.replace(truth(position), logprob=float32(-99.5))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class LogMachine(RuleBasedStateMachine):
    """Whatever is appended, what stands is a prefix of the right sequence, and it only grows until it expires."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.logs = MemoryLogs(1 << 20, self.clock)
        self.tops: list[int] = []
        """The alternatives that the log must know of each token."""

    @rule(
        position=st.integers(0, 12), count=st.integers(1, 6), top=st.integers(0, 3), bad=st.none() | st.integers(0, 5)
    )
    def append(self, position: int, count: int, top: int, bad: int | None) -> None:
        tokens = [truth(position + i, top) for i in range(count)]
        if bad is not None and bad < count:
            tokens[bad] = wrong(position + bad)
        if position > len(self.tops):
            with pytest.raises(Gap) as gap:
                self.logs.append(KEY, position, tokens, 10)
            assert gap.value.length == len(self.tops)
        elif bad is not None and bad < count and position + bad < len(self.tops):
            with pytest.raises(Conflict) as conflict:
                self.logs.append(KEY, position, tokens, 10)
            assert conflict.value.position == position + bad
        elif bad is None:
            self.logs.append(KEY, position, tokens, 10)
            self.tops += [0] * (position + count - len(self.tops))
            for at in range(position, position + count):
                self.tops[at] = max(self.tops[at], top)

    @rule()
    def expire(self) -> None:
        self.clock.now += 10
        self.tops = []

    @rule()
    def wait(self) -> None:
        self.clock.now += 0.001

    @rule(other=st.binary(min_size=1, max_size=1))
    def append_elsewhere(self, other: bytes) -> None:
        self.logs.append(other, 0, [truth(0)], 10)

    @invariant()
    def stands(self) -> None:
        assert list(self.logs.read(KEY)) == [truth(at, top) for at, top in enumerate(self.tops)]
        assert self.logs.bytes == sum(log.size for log in self.logs._logs.values())


LogMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestLog = LogMachine.TestCase


def test_the_bound_holds_and_what_was_used_last_stays() -> None:
    most = 20 * (LOG_BYTES + PIECE_BYTES)
    logs = MemoryLogs(most, Clock())
    logs.append(b"kept", 0, [truth(0)], 10)
    for number in range(1000):
        logs.append(b"%d" % number, 0, [truth(0)], 10)
        assert logs.read(b"kept") and logs.bytes <= most
    assert 10 <= len(logs) <= 20
    logs.append(b"huge", 0, [truth(i) for i in range(3000)], 10)
    assert (len(logs), logs.bytes) == (0, 0), "what is larger than the bound is not kept at all"


@pytest.mark.parametrize(("tokens", "top", "at_once"), [(1, 0, 1), (64, 0, 64), (64, 5, 64), (64, 0, 1), (64, 0, 7)])
def test_a_log_takes_no_more_memory_than_is_counted(tokens: int, top: int, at_once: int) -> None:
    logs = MemoryLogs(1 << 30, Clock())
    entries = [truth(position, top) for position in range(tokens)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(100):
        key = number.to_bytes(32, "big")
        for position in range(0, tokens, at_once):
            logs.append(key, position, entries[position : position + at_once], 10)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * logs.bytes <= after - before <= logs.bytes
    least = tokens * (6 + (top > 0) + 6 * top)
    assert 100 * least < logs.bytes < 100 * (LOG_BYTES + PIECES * PIECE_BYTES + 2 * least)
