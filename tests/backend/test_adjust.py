"""Biases, penalties and the minimum length: against counting by hand, and verified answers against each other."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence, Set

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.admission import Changes
from backend.engine.kv_pool import block_bytes
from backend.engine.tasks import DecodeTask, Task
from backend.kernels.adjust import Past, adjust
from backend.kernels.ops import CPU_FIXED
from backend.kernels.sampling import Draw, choose
from backend.protocol import Grammar, Sampling
from tests.backend.harness import (
    TINY,
    Calls,
    Waiter,
    decode_task,
    draft_task,
    running_engine,
    tiny_checkpoint,
    verify_task,
)

VOCAB = TINY.vocab_size
CHECKPOINT = tiny_checkpoint()
BLOCK_BYTES = block_bytes(TINY, torch.bfloat16)
PROMPT = [7, 300, 21, 21, 5, 88, 130, 2, 14]
LONG = [(7 * i * i + 3 * i) % VOCAB for i in range(150)]

penalties = st.floats(-2, 2)
adjustments = st.builds(
    Sampling,
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.floats(0, 100, exclude_min=True) | st.just(1.0),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=20).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    min_tokens=st.integers(0, 6),
)


def by_hand(logits: Sequence[float], sampling: Sampling, past: Past) -> list[float]:
    """What the protocol says, a logit at a time."""
    prompt = past.tokens[: len(past.tokens) - past.generated]
    counts = Counter(past.tokens[len(prompt) :])
    biases = dict(sampling.logit_bias)
    adjusted: list[float] = []
    for id_, raw in enumerate(logits):
        logit = np.float32(raw)
        if id_ in biases:
            logit = logit + np.float32(biases[id_])
        if id_ in past.tokens:
            penalty = np.float32(sampling.repetition_penalty)
            with np.errstate(divide="ignore", over="ignore"):
                logit = logit / penalty if logit > 0 else logit * penalty
            logit = np.clip(logit, np.float32(-1e30), np.float32(1e30))
        if id_ in counts:
            logit = logit - np.float32(sampling.frequency_penalty) * np.float32(counts[id_])
            logit = logit - np.float32(sampling.presence_penalty)
        if past.generated < sampling.min_tokens and id_ in past.stop_ids:
            logit = np.float32(-1e35)
        adjusted.append(float(logit))
    return adjusted


@st.composite
def pasts(draw: st.DrawFn) -> Past:
    tokens = draw(st.lists(st.integers(0, 9) | st.integers(0, VOCAB - 1), min_size=1, max_size=40))
    return Past(
        tokens, draw(st.integers(0, len(tokens) - 1)), draw(st.frozensets(st.integers(0, VOCAB + 5), max_size=9))
    )


@given(adjustments, pasts(), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_it_is_what_counting_by_hand_gives(sampling: Sampling, past: Past, seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 8
    expected = torch.tensor(by_hand(logits.tolist(), sampling, past))
    adjust(logits, sampling, past)
    assert torch.equal(logits, expected)


@given(st.lists(st.tuples(adjustments, pasts(), st.sampled_from([0.0, 0.8])), min_size=1, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_company_never_matters(rows: list[tuple[Sampling, Past, float]], neutral: bool) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    draws = [Draw(msgspec.structs.replace(s, temperature=t), i, past) for i, (s, past, t) in enumerate(rows)]
    if neutral:
        draws[0] = Draw(Sampling(), 0)
    before = logits.clone()
    together = choose(logits, draws)
    assert torch.equal(logits, before), "the model's own logits are for the logprobs"
    for row, draw in enumerate(draws):
        assert choose(logits[row : row + 1].clone(), [draw])[0] == together[row]


def test_a_sampling_that_adjusts_needs_its_past() -> None:
    neutral = Sampling(presence_penalty=-0.0, repetition_penalty=1.0, min_tokens=0)
    assert not neutral.adjusts
    Draw(neutral, 0)
    for sampling in ADJUSTED:
        assert sampling.adjusts
        with pytest.raises(AssertionError):
            Draw(sampling, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.2}])
def test_stop_ids_cannot_be_chosen_before_the_minimum(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.zeros(40, 8)
    logits[:, [2, 5]] = 60.0
    sampling = Sampling(temperature=temperature, min_tokens=3, repetition_penalty=1e-40, **filters)  # type: ignore[arg-type]
    for generated, allowed in ((0, False), (2, False), (3, True)):
        past = Past([2, 5, *[1] * generated], generated, frozenset({2, 5, 99}))
        chosen = set(choose(logits, [Draw(sampling, position, past) for position in range(40)]).tolist())
        assert bool(chosen & {2, 5}) == allowed


def bits(ids: Set[int], size: int) -> bytes:
    mask = bytearray(-(-size // 8))
    for id_ in ids:
        mask[id_ // 8] |= 1 << id_ % 8
    return bytes(mask)


@given(
    adjustments,
    pasts(),
    st.frozensets(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.7, 100.0]),
    st.sampled_from([{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}]),
)
@settings(max_examples=100, deadline=None)
def test_only_what_a_grammar_allows_is_chosen(
    sampling: Sampling, past: Past, allowed: frozenset[int], temperature: float, filters: dict[str, float]
) -> None:
    grammar = Grammar("regex", "a")
    masked = msgspec.structs.replace(sampling, temperature=temperature, grammar=grammar, **filters)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 8
    # The mask may be padded; what stands behind the vocabulary is nobody's.
    within = Past(past.tokens, past.generated, past.stop_ids, bits(allowed | {VOCAB + 1}, VOCAB + 40))
    chosen = set(choose(logits, [Draw(masked, position, within) for position in range(4)]).tolist())
    open_ = allowed - past.stop_ids if past.generated < sampling.min_tokens else allowed
    assert chosen <= (open_ or allowed)
    free = logits.clone()
    adjust(free[0], msgspec.structs.replace(sampling, min_tokens=0), past)
    bound = logits.clone()
    adjust(bound[0], msgspec.structs.replace(masked, min_tokens=0), within)
    ids = sorted(allowed)
    assert torch.equal(bound[0, ids], free[0, ids]), "what is allowed keeps its logits"


# --- in the engine ---------------------------------------------------------------------------------------------------

ADJUSTED = [
    Sampling(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4),
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.9, top_p=0.95, seed=42, frequency_penalty=-0.3, repetition_penalty=1.6),
    Sampling(
        temperature=0.8,
        seed=7,
        presence_penalty=1.5,
        logit_bias=((3, 6.5), (14, -100.0), (88, 4.0), (248, -9.0), (284, -9.0)),
    ),
]


def plain(calls: Calls, prompt: list[int], count: int, sampling: Sampling) -> list[tuple[int, float]]:
    """Decoding in the fixed lane alone, one token a pass."""
    done: list[tuple[int, float]] = []
    while len(done) < count:
        task = calls.verify(prompt + [token for token, _ in done], [], sampling, generated=len(done))
        done += [(token.id, token.logprob) for token in task.produced]
    return done


def reference(
    calls: Calls, prompt: list[int], count: int, sampling: Sampling, stop: Set[int] = frozenset()
) -> list[int]:
    """The model's own logits, adjusted by hand, one token a call."""
    bare = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
    done: list[int] = []
    while len(done) < count and not (done and done[-1] in stop):
        task = verify_task(prompt + done, [], Sampling(temperature=0.0), top=VOCAB)
        task.top_as_logprobs = False
        calls.run(task)
        logits = [score.score for score in sorted(task.produced[0].top, key=lambda score: score.id)]
        row = torch.tensor([by_hand(logits, sampling, Past(prompt + done, len(done), stop))])
        done.append(int(choose(row, [Draw(bare, len(prompt) + len(done))])[0]))
    return done


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    with running_engine(CHECKPOINT, request.param, kv_bytes=120 * BLOCK_BYTES) as running:
        yield running
        running.engine._cache.check_integrity()


@pytest.mark.parametrize("sampling", ADJUSTED, ids=range(len(ADJUSTED)))
def test_windows_and_decoding_give_what_counting_by_hand_gives(calls: Calls, sampling: Sampling) -> None:
    for prompt in (PROMPT, LONG):
        expected = plain(calls, prompt, 50, sampling)
        ids = [id_ for id_, _ in expected]
        assert ids == reference(calls, prompt, 50, sampling)
        bare = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
        assert ids != [id_ for id_, _ in plain(calls, prompt, 50, bare)], "nothing was adjusted: this proves nothing"
        for windows in [(1,), (4,), (16,), (3, 11, 1, 40)]:
            assert calls.complete(prompt, 50, sampling, windows) == expected
        for lengths in [(1,), (7,), (1, 30)]:
            assert calls.decode(prompt, 50, sampling, lengths) == expected


@pytest.mark.parametrize("sampling", ADJUSTED, ids=range(len(ADJUSTED)))
def test_refused_drafts_leave_no_trace(calls: Calls, sampling: Sampling) -> None:
    """Drafts that repeat what the penalties are about, right up to a token and wrong behind it."""
    expected = plain(calls, PROMPT, 50, sampling)
    rng = random.Random(5)
    done: list[tuple[int, float]] = []
    while len(done) < len(expected):
        ids = [token for token, _ in expected]
        right = ids[len(done) : len(done) + rng.randint(0, 6)]
        wrong = rng.choice([[ids[0]] * 9, PROMPT, [rng.randrange(VOCAB) for _ in range(20)], ids[:12]])
        context = PROMPT + [token for token, _ in done]
        done += [
            (t.id, t.logprob) for t in calls.verify(context, right + wrong, sampling, generated=len(done)).produced
        ]
    assert done[: len(expected)] == expected


def test_other_slots_and_company_change_nothing(calls: Calls) -> None:
    prompts = [PROMPT, LONG, LONG[:63], PROMPT[:1]]
    alone = [plain(calls, prompt, 30, ADJUSTED[i]) for i, prompt in enumerate(prompts)]
    answers: dict[int, list[tuple[int, float]]] = {}

    def ask(index: int) -> None:
        way = calls.complete if index % 2 else calls.decode
        answers[index] = way(prompts[index % 4], 30, ADJUSTED[index % 4], (1 + index, 5))

    # Streams in the same passes, and drafts of calls that have no adjustments at all.
    crowd = [DecodeTask(PROMPT[: 1 + i], 100, ADJUSTED[i], frozenset(), top=0, is_draft=False) for i in range(4)]
    crowd.append(draft_task(PROMPT, 100, Sampling(temperature=0.0)))
    waiters = [Waiter() for _ in crowd]
    for task, waiter in zip(crowd, waiters, strict=True):
        calls.engine.submit(task, waiter)
    askers = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    for waiter in waiters:
        waiter.wait()
    assert answers == {index: alone[index % 4] for index in range(8)}


def test_generated_tells_the_prompt_from_the_answer(calls: Calls) -> None:
    """Presence and frequency look at generated tokens alone; repetition looks at the whole context."""
    penalised = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    greedy = Sampling(temperature=0.0)
    (best,) = (token.id for token in calls.verify(PROMPT, [], greedy).produced)
    context = [*PROMPT, *[best] * 30]
    again = calls.verify(context, [], greedy).produced[0].id
    context = [*PROMPT, *[again] * 30]
    raw = calls.verify(context, [], greedy).produced[0]
    assert calls.verify(context, [], penalised, generated=0).produced == [raw]
    for generated in (1, 30):
        (token,) = calls.verify(context, [], penalised, generated=generated).produced
        expected = Counter(context[-generated:])
        top = verify_task(context, [], greedy, top=VOCAB)
        calls.run(top)
        scores = {
            score.id: score.score - 2.0 * expected[score.id] - 2.0 * (score.id in expected)
            for score in top.produced[0].top
        }
        assert scores[token.id] == max(scores.values())
    assert calls.verify(context, [], Sampling(temperature=0.0, repetition_penalty=100.0)).produced[0].id not in context


def test_logprobs_are_those_of_the_models_own_logits(calls: Calls) -> None:
    raw = calls.verify(PROMPT, [], Sampling(temperature=0.0), top=20).produced[0]
    biased = calls.verify(PROMPT, [], Sampling(temperature=0.0, logit_bias=((raw.top[3].id, 100.0),)), top=20).produced[
        0
    ]
    assert (biased.id, biased.logprob) == (raw.top[3].id, raw.top[3].score)
    assert (biased.top, biased.margin) == (raw.top, raw.margin)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stop_ids_wait_for_the_minimum(calls: Calls, temperature: float) -> None:
    bare = Sampling(temperature=temperature, seed=1)
    ids = [id_ for id_, _ in plain(calls, PROMPT, 12, bare)]
    stop = frozenset({ids[2], ids[4]})
    for minimum in (0, 1, 3, 9):
        sampling = Sampling(temperature=temperature, seed=1, min_tokens=minimum)
        expected = reference(calls, PROMPT, 40, sampling, stop)
        assert not stop & set(expected[:minimum]) and len(expected) > minimum
        whole = decode_task(PROMPT, 40, sampling, stop)
        calls.run(whole)
        stream = DecodeTask(PROMPT, 40, sampling, stop, top=0, is_draft=False)
        calls.run(stream)
        assert not stop & {token.id for token in stream.produced[:minimum]}
        done: list[int] = []
        while len(done) < 40 and not (done and done[-1] in stop):
            task = verify_task([*PROMPT, *done], [ids[2]] * 3, sampling, stop=stop, generated=len(done))
            calls.run(task)
            done += [token.id for token in task.produced]
        produced = [token.id for token in whole.produced]
        assert produced[:40] == done[:40] == expected[: len(produced)]


def test_preempted_streams_count_what_they_said_before() -> None:
    """Streams that lose their memory and come back go on as if they had not. (In arithmetic that allows to compare.)"""
    sampling = Sampling(temperature=0.7, seed=3, frequency_penalty=1.5, presence_penalty=2.0, repetition_penalty=1.2)
    prompts = [[i, i, i] for i in range(20)]
    with running_engine(CHECKPOINT, fast=CPU_FIXED) as calls:
        expected = [[token for token, _ in calls.decode(prompt, 150, sampling, (150,))] for prompt in prompts]
        verified = plain(calls, PROMPT, 30, ADJUSTED[2])
    with running_engine(CHECKPOINT, fast=CPU_FIXED, kv_bytes=14 * BLOCK_BYTES) as calls:
        admission = calls.engine._scheduler.admission
        make_room, preempted = admission.make_room, list[Task]()

        def observed(streams: Sequence[DecodeTask]) -> Changes:
            changes = make_room(streams)
            preempted.extend(task for task in changes.preempted if task.produced)
            return changes

        admission.make_room = observed  # type: ignore[method-assign]
        streams = [DecodeTask(prompt, 150, sampling, frozenset(), top=0, is_draft=False) for prompt in prompts]
        waiters = [Waiter() for _ in streams]
        for stream, waiter in zip(streams, waiters, strict=True):
            calls.engine.submit(stream, waiter)
        assert calls.complete(PROMPT, 30, ADJUSTED[2]) == calls.decode(PROMPT, 30, ADJUSTED[2]) == verified
        for waiter in waiters:
            waiter.wait()
        assert preempted, "this proves nothing"
        assert [[token.id for token in stream.produced] for stream in streams] == expected
