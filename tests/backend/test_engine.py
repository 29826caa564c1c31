"""The engine's promise, bitwise, on a tiny random model: what is verified depends on the request alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.admission import QueueFullError
from backend.engine.engine import EngineError
from backend.engine.kv_pool import RESERVED_BLOCKS, ZERO_BLOCK, block_bytes
from backend.engine.lane_costs import Advice
from backend.engine.scheduler import Pass
from backend.engine.tasks import DecodeTask, Scored, Task
from backend.kernels.ops import CPU_FAST, CPU_FIXED
from backend.protocol import Batching, Sampling
from backend.settings import Dtype
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

CHECKPOINT = tiny_checkpoint()
BLOCK_BYTES = block_bytes(TINY, torch.bfloat16)
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=42)
LONG = [(7 * i * i + 3 * i) % TINY.vocab_size for i in range(150)]


def _bytes(dtype: Dtype, blocks: int) -> int:
    return (blocks + RESERVED_BLOCKS) * block_bytes(TINY, getattr(torch, dtype))


PROMPT = [7, 300, 21, 21, 5, 88, 130, 2, 14]


def plain(calls: Calls, prompt: list[int], count: int, sampling: Sampling) -> list[tuple[int, float]]:
    """Decoding in the fixed lane alone, one token a pass."""
    done: list[tuple[int, float]] = []
    while len(done) < count:
        task = calls.verify(prompt + [token for token, _ in done], [], sampling)
        done += [(token.id, token.logprob) for token in task.produced]
    return done


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_windows_shapes_and_threads_give_the_same_bits(dtype: Dtype, sampling: Sampling) -> None:
    with running_engine(CHECKPOINT, dtype) as calls:
        expected = plain(calls, PROMPT, 80, sampling)
        for windows in [(1,), (2,), (4,), (8,), (16,), (64,), (3, 11, 1, 40)]:
            assert calls.complete(PROMPT, 80, sampling, windows) == expected
    for groups, window, threads in [(1, 16, 1), (4, 32, 2), (8, 64, 1)]:
        with running_engine(CHECKPOINT, dtype, groups, window, threads=threads) as calls:
            assert calls.complete(PROMPT, 80, sampling, (15,)) == expected
    # Padded with dummies to the full shape, as arithmetic has it that depends on the shape.
    padded = replace(CPU_FIXED, shape_invariant=False)
    for groups, window in [(1, 16), (4, 8)]:
        with running_engine(CHECKPOINT, dtype, groups, window, fixed=padded) as calls:
            assert calls.complete(PROMPT, 80, sampling, (7,)) == expected


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def calls(request: pytest.FixtureRequest) -> object:
    """An engine with little memory, warm from test to test."""
    with running_engine(CHECKPOINT, request.param, kv_bytes=_bytes(request.param, blocks=24)) as running:
        yield running
        running.engine._cache.check_integrity()


@pytest.fixture(scope="module")
def expected(calls: Calls) -> list[tuple[int, float]]:
    return plain(calls, PROMPT, 60, SEEDED)


drafts = st.one_of(
    st.just([]),
    st.lists(st.integers(0, TINY.vocab_size - 1), max_size=40),
    st.integers(1, 20).map(lambda count: [2] * count),
    st.lists(st.just(None), max_size=20),  # None: what the drafter itself would say.
)


@given(st.lists(drafts, min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_poisoned_drafter_changes_nothing(
    calls: Calls, expected: list[tuple[int, float]], plan: list[list[int | None]], rng: random.Random
) -> None:
    done: list[tuple[int, float]] = []
    turn = 0
    while len(done) < len(expected):
        context = PROMPT + [token for token, _ in done]
        wanted = plan[turn % len(plan)]
        own = calls.draft(context, len(wanted), SEEDED) if None in wanted else []
        draft = [own[i] if token is None else token for i, token in enumerate(wanted[: len(own) or None])]
        if rng.random() < 0.3:
            draft = [token for token, _ in expected[len(done) : len(done) + 9]] + draft
        task = calls.verify(context, draft, SEEDED)
        assert len(task.produced) == task.agreed + 1, "every pass commits the agreed drafts and one token more"
        assert [token.id for token in task.produced[: task.agreed]] == draft[: task.agreed]
        done += [(token.id, token.logprob) for token in task.produced]
        turn += 1
    assert done[: len(expected)] == expected


def test_company_cancellations_and_evictions_change_nothing(calls: Calls) -> None:
    """With little memory, verified answers in random traffic equal those of a fresh idle engine, bitwise."""
    rng = random.Random(3)
    shared = [rng.randrange(TINY.vocab_size) for _ in range(150)]
    lengths = [rng.choice([1, 63, 64, 65, 128, 150]) for _ in range(10)]
    prompts = [[*shared[:length], rng.randrange(TINY.vocab_size)] for length in lengths]
    samplings = [GREEDY, SEEDED, Sampling(temperature=1.0, seed=7, top_k=20), Sampling(temperature=1.3, min_p=0.1)]
    with running_engine(CHECKPOINT, calls.engine.info.dtype) as fresh:  # type: ignore[arg-type]
        alone = [fresh.complete(prompt, 40, samplings[i % 4]) for i, prompt in enumerate(prompts)]
    evictions = calls.engine._cache.evictions
    stop = threading.Event()

    def noise(seed: int) -> None:
        local = random.Random(seed)
        while not stop.is_set():
            context = [*prompts[local.randrange(10)][: local.randint(1, 150)], local.randrange(TINY.vocab_size)]
            sampling = samplings[local.randrange(4)]
            if local.random() < 0.5:
                draft = [local.randrange(TINY.vocab_size) for _ in range(local.randint(0, 90))]
                task = local.choice([verify_task(context, draft, sampling), decode_task(context, 30, sampling)])
            else:
                count, is_draft = local.randint(1, 100), local.random() < 0.5
                task = DecodeTask(context, count, sampling, frozenset(), top=0, is_draft=is_draft)
            waiter = Waiter()
            calls.engine.submit(task, waiter)
            if local.random() < 0.4:
                gone = threading.Event()
                calls.engine.cancel(task, gone.set)
                gone.wait(60)
            else:
                waiter.wait()

    answers: dict[int, list[tuple[int, float]]] = {}

    def ask(index: int) -> None:
        windows = (1 + index % 5, 3, 12)
        answers[index] = calls.complete(prompts[index % 10], 40, samplings[index % 10 % 4], windows)

    crowd = [threading.Thread(target=noise, args=(seed,)) for seed in range(4)]
    askers = [threading.Thread(target=ask, args=(index,)) for index in range(20)]
    for thread in crowd + askers:
        thread.start()
    for thread in askers:
        thread.join()
    stop.set()
    for thread in crowd:
        thread.join()
    assert answers == {index: alone[index % 10] for index in range(20)}
    assert len({tuple(answer) for answer in alone}) == 10 and calls.engine._cache.evictions > evictions
    assert calls.engine._cache.leased_calls == 0
    calls.engine._cache.check_integrity()


def test_fast_kv_is_never_taken_for_verified(dtype: Dtype) -> None:
    """A verified call on a prefix that the fast lane computed recomputes it, in place and in a copied tail."""
    with running_engine(CHECKPOINT, dtype) as calls:
        expected = calls.verify(LONG, [5] * 9, SEEDED)
        elsewhere = calls.verify([*LONG[:140], 1, 2, 3], [], SEEDED)
    with running_engine(CHECKPOINT, dtype) as calls:
        crowd = [draft_task(LONG[: 20 * i], 30, GREEDY) for i in range(1, 5)]
        fast = draft_task(LONG, 40, SEEDED)
        calls.run(*crowd, fast)
        verified = calls.verify(LONG, [5] * 9, SEEDED)
        assert fast.produced[0] != verified.produced[0], "the lanes agree: this proves nothing"
        assert verified.produced == expected.produced
        assert calls.verify([*LONG[:140], 1, 2, 3], [], SEEDED).produced == elsewhere.produced


def test_a_draft_leaves_verified_kv_alone(dtype: Dtype) -> None:
    """Drafting on a context that is verified in full runs its last row again, but not over the verified KV."""
    with running_engine(CHECKPOINT, dtype) as calls:
        expected = calls.verify([*LONG, 9, 8, 7], [], SEEDED)
    for length in (len(LONG), 128):
        with running_engine(CHECKPOINT, dtype) as calls:
            calls.verify(LONG, [], SEEDED)
            calls.run(*(draft_task(LONG[:length], 3, GREEDY) for _ in range(4)))
            assert calls.verify([*LONG, 9, 8, 7], [], SEEDED).produced == expected.produced


def test_what_a_block_held_before_does_not_matter(dtype: Dtype) -> None:
    with running_engine(CHECKPOINT, dtype) as calls:
        expected = calls.complete(PROMPT, 70, SEEDED)
    with running_engine(CHECKPOINT, dtype) as calls:
        kv = calls.engine._runner._kv
        for pool in (*kv.keys, *kv.values):
            pool[ZERO_BLOCK + 1 :] = float("nan")
        assert calls.complete(PROMPT, 70, SEEDED) == expected
        # Beside a longer sequence, what a grown block holds behind its last row is within reach, if masked.
        growing = DecodeTask(PROMPT, 300, SEEDED, frozenset(), top=0, is_draft=False)
        longer = DecodeTask(LONG, 300, SEEDED, frozenset(), top=0, is_draft=False)
        calls.run(growing, longer)
        assert len(growing.produced) == len(longer.produced) == 300


@contextmanager
def watched(calls: Calls) -> Iterator[list[Pass]]:
    """The passes the engine runs from here on. The first one waits until the context is left: all is submitted then."""
    runner, passes, gate = calls.engine._runner, [], threading.Event()
    run = runner.run

    def watch(work: Pass) -> list[list[Scored | None]]:
        assert gate.wait(60)
        passes.append(work)
        return run(work)

    runner.run = watch  # type: ignore[method-assign]
    yield passes
    gate.set()


def submitted(calls: Calls, *tasks: Task) -> list[Waiter]:
    waiters = [Waiter() for _ in tasks]
    for task, waiter in zip(tasks, waiters, strict=True):
        calls.engine.submit(task, waiter)
    return waiters


def test_unverified_sequences_ride_along_in_the_fixed_lane() -> None:
    with running_engine(CHECKPOINT) as calls:
        stream = DecodeTask([4, 4], 200, GREEDY, frozenset(), top=0, is_draft=False)
        direct = decode_task(PROMPT, 61, SEEDED)
        with watched(calls) as passes:
            waiters = submitted(calls, stream, direct)
        for waiter in waiters:
            waiter.wait()
    shared = [index for index, work in enumerate(passes) if {span.task for span in work.spans} == {stream, direct}]
    assert len(shared) >= 50 and all(passes[index].lane == "fixed" for index in shared)
    assert shared == list(range(shared[0], shared[-1] + 1)), "the stream had passes of its own as well"


def test_long_prompts_do_not_hold_up_what_decodes() -> None:
    """Between two rows of a stream that rides along there are never more than a few passes."""
    with running_engine(CHECKPOINT, groups=1, window=8) as calls:
        stream = DecodeTask([4, 4], 150, GREEDY, frozenset(), top=0, is_draft=False)
        direct = decode_task(PROMPT, 151, SEEDED)
        prompts = [verify_task([i, *LONG], [], GREEDY) for i in range(12)]
        with watched(calls) as passes:
            waiters = submitted(calls, stream, direct, *prompts)
        for waiter in waiters:
            waiter.wait()
    rows = [index for index, work in enumerate(passes) if any(span.task is stream for span in work.spans)]
    long = [index for index, work in enumerate(passes) if any(span.task in prompts for span in work.spans)]
    assert len([index for index in long if rows[0] < index < rows[-1]]) > 20, "no prompt ran meanwhile"
    assert max(after - before for before, after in pairwise(rows)) <= 4


def test_logprobs_of_a_verified_answer_are_a_distribution(calls: Calls) -> None:
    task = calls.verify(PROMPT, [], GREEDY, top=20)
    top = task.produced[0].top
    assert top[0].id == task.produced[0].id and top[0].score == task.produced[0].logprob
    assert [score.score for score in top] == sorted((score.score for score in top), reverse=True)


def test_stop_tokens_and_the_context_limit_end_a_sequence(calls: Calls) -> None:
    answer = plain(calls, PROMPT, 12, GREEDY)
    ids = [token for token, _ in answer]
    stop = frozenset({ids[5]})
    first = ids.index(ids[5])
    verified = verify_task(PROMPT, ids[:10], GREEDY, stop=stop)
    drafted = draft_task(PROMPT, 10, GREEDY, stop=frozenset({331 + 1}))
    calls.run(verified, drafted)
    assert verified.finish == "stop" and [token.id for token in verified.produced] == ids[: first + 1]
    assert drafted.finish is None and len(drafted.produced) == 10
    limit = calls.engine.info.max_context
    long = [5] * (limit - 3)
    verified = verify_task(long, [], GREEDY)
    drafted = draft_task(long, 50, GREEDY)
    calls.run(verified, drafted)
    assert verified.finish is None and len(verified.produced) == 1
    assert drafted.finish == "length" and len(drafted.produced) == 3
    end = verify_task([5] * (limit - 1), [], GREEDY)
    calls.run(end)
    assert end.finish == "length" and len(end.produced) == 1


def test_a_cancelled_call_frees_what_it_holds(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    run = calls.engine._runner.run

    def slowly(work: Pass) -> list[list[Scored | None]]:
        time.sleep(0.005)  # So that the call is still under way when it is cancelled.
        return run(work)

    monkeypatch.setattr(calls.engine._runner, "run", slowly)
    task = draft_task(PROMPT, 400, GREEDY)
    waiter = Waiter()
    calls.engine.submit(task, waiter)
    assert waiter.first_token.wait(60)
    gone = threading.Event()
    calls.engine.cancel(task, gone.set)
    assert gone.wait(60)
    assert task.lease is None and len(task.produced) < 400
    assert calls.engine._cache.leased_calls == 0
    calls.engine.cancel(task, gone.set)  # Again, and after its end: nothing happens.


def test_streams_under_memory_pressure_end_and_verified_calls_go_on() -> None:
    """Twenty streams that need more memory than there is, and verified answers among them."""
    with running_engine(CHECKPOINT) as calls:
        expected = calls.complete(PROMPT, 30, SEEDED)
    with running_engine(CHECKPOINT, kv_bytes=14 * BLOCK_BYTES) as calls:
        streams = [DecodeTask([i, i, i], 150, GREEDY, frozenset(), top=0, is_draft=False) for i in range(20)]
        waiters = [Waiter() for _ in streams]
        for stream, waiter in zip(streams, waiters, strict=True):
            calls.engine.submit(stream, waiter)
        for way in (calls.complete, calls.decode):
            assert way(PROMPT, 30, SEEDED) == expected
            assert any(stream.lease is not None or not stream.done for stream in streams), "they had ended before"
        for waiter in waiters:
            waiter.wait()
        assert all(len(stream.produced) == 150 for stream in streams)
        assert calls.engine._cache.leased_calls == 0
        calls.engine._cache.check_integrity()


def stream_task(prompt: list[int], count: int, batching: Batching, sampling: Sampling = SEEDED) -> DecodeTask:
    return DecodeTask(prompt, count, sampling, frozenset(), top=0, is_draft=False, batching=batching)


def answer(task: DecodeTask) -> list[tuple[int, float]]:
    return [(token.id, token.logprob) for token in task.produced]


@pytest.mark.parametrize("shape_invariant", [True, False])
def test_invariant_streams_have_the_verified_bits(shape_invariant: bool) -> None:
    """In company, on memory so short that they are preempted and resumed, and on prefixes that the fast lane left."""
    prompts = [[*LONG[: 30 * i], i] for i in range(5)]
    with running_engine(CHECKPOINT) as calls:
        expected = [plain(calls, prompt, 90, SEEDED) for prompt in prompts]
    fixed = replace(CPU_FIXED, shape_invariant=shape_invariant)
    with running_engine(CHECKPOINT, kv_bytes=14 * BLOCK_BYTES, fixed=fixed) as calls:
        calls.run(*(draft_task(prompt, 20, GREEDY) for prompt in prompts))
        streams = [stream_task(prompts[i % 5], 90, "dynamic" if i % 4 == 3 else "invariant") for i in range(15)]
        waiters = submitted(calls, *streams)
        assert calls.decode(prompts[1], 30, SEEDED) == expected[1][:30]
        for waiter in waiters:
            waiter.wait()
        for i, stream in enumerate(streams):
            if stream.batching == "invariant":
                assert answer(stream) == expected[i % 5], f"stream {i}"
        assert calls.engine.stats().preemptions > 0, "memory was not short"
        assert calls.engine._cache.leased_calls == 0
        calls.engine._cache.check_integrity()


def test_streams_with_a_batch_of_one_share_no_pass_and_no_kv() -> None:
    with running_engine(CHECKPOINT) as calls:
        alone = stream_task(LONG, 60, "none")
        calls.run(alone)
    with running_engine(CHECKPOINT, kv_bytes=24 * BLOCK_BYTES) as calls:
        calls.run(*(draft_task(LONG[: 40 * i], 30, GREEDY) for i in range(1, 4)))
        crowd = [stream_task([i, i], 120, "dynamic") for i in range(6)]
        ones = [stream_task(LONG, 60, "none"), stream_task(LONG, 60, "none"), stream_task(LONG[:70], 40, "none")]
        with watched(calls) as passes:
            waiters = submitted(calls, *crowd, *ones)
        for waiter in waiters:
            waiter.wait()
    assert answer(ones[0]) == answer(ones[1]) == answer(alone)
    own = [index for index, work in enumerate(passes) if any(span.task in ones for span in work.spans)]
    assert all(len(passes[index].spans) == 1 and passes[index].lane == "fast" for index in own)
    assert max(after - before for before, after in pairwise(own)) <= 2, "each queue has its turn"
    order = [passes[index].spans[0].task for index in own]
    assert [task for i, task in enumerate(order) if i == 0 or order[i - 1] is not task] == ones, "one after the other"


def test_lanes_that_coincide_need_no_verification() -> None:
    claims_falsely = replace(CPU_FAST, shape_invariant=True)
    for fast, drafts in ((CPU_FIXED, False), (claims_falsely, None)):
        with running_engine(CHECKPOINT, "float32", fast=fast) as calls:
            task = calls.verify(PROMPT, [], SEEDED)
            advice = calls.engine.stats().advice
            if drafts is None:
                assert Advice(False, "lanes_coincide") not in advice
            else:
                assert not task.wants_draft and advice == {Advice(False, "lanes_coincide"): 1}
                stream = stream_task(PROMPT, 40, "dynamic")
                calls.run(stream, stream_task(LONG, 40, "dynamic"))
                assert answer(stream) == plain(calls, PROMPT, 40, SEEDED)


def test_stats_count_what_was_done(calls: Calls) -> None:
    before = calls.engine.stats()
    answer_ids = [token for token, _ in plain(calls, PROMPT, 8, GREEDY)]
    wrong = [*answer_ids[:3], (answer_ids[3] + 1) % TINY.vocab_size, 0, 0]
    calls.verify(PROMPT, wrong, GREEDY)
    calls.verify(PROMPT, answer_ids[:5], GREEDY)
    calls.run(stream_task(PROMPT, 11, "dynamic"), draft_task(PROMPT, 4, GREEDY))
    after = calls.engine.stats()

    def grown(name: str) -> int:
        value: int = getattr(after, name) - getattr(before, name)
        return value

    assert (grown("windows"), grown("rollbacks"), grown("drafted"), grown("rolled_back")) == (2, 1, 11, 3)
    assert {use: after.tokens[use] - before.tokens.get(use, 0) for use in after.tokens} == {
        "verified": 8 + 4 + 6,
        "stream": 11,
        "draft": 4,
    }
    assert all(after.passes[lane] > before.passes.get(lane, 0) for lane in ("fast", "fixed"))
    assert sum(after.advice.values()) - sum(before.advice.values()) == 8 + 2
    assert (after.running, after.waiting) == (0, 0) and after.blocks == 24
    assert after.blocks_available == after.blocks


def test_a_context_whose_logits_are_not_finite_fails_alone() -> None:
    weights = dict(CHECKPOINT.weights)
    weights["embedding"] = weights["embedding"].clone()
    weights["embedding"][100] = float("nan")
    with running_engine(CHECKPOINT) as calls:
        expected = calls.verify(PROMPT, [5, 6], SEEDED).produced
    with running_engine(replace(CHECKPOINT, weights=weights)) as calls:
        good, bad = verify_task(PROMPT, [5, 6], SEEDED), verify_task([3, 100, 3], [], GREEDY)
        fast = draft_task([3, 100, 3], 5, GREEDY)
        waiters = [Waiter(), Waiter(), Waiter()]
        for task, waiter in zip((good, bad, fast), waiters, strict=True):
            calls.engine.submit(task, waiter)
        waiters[0].wait()
        assert good.produced == expected
        for waiter in waiters[1:]:
            with pytest.raises(EngineError, match="not finite"):
                waiter.wait()
        assert calls.verify(PROMPT, [5, 6], SEEDED).produced == expected


@pytest.mark.parametrize("shape_invariant", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_draft_that_is_not_finite_spoils_nothing_before_it_or_in_its_place(
    value: float, shape_invariant: bool
) -> None:
    weights = dict(CHECKPOINT.weights)
    weights["embedding"] = weights["embedding"].clone()
    weights["embedding"][100] = value
    fixed = replace(CPU_FIXED, shape_invariant=shape_invariant)
    with running_engine(replace(CHECKPOINT, weights=weights), fixed=fixed) as calls:
        expected = calls.verify(PROMPT, [], GREEDY).produced
        assert calls.verify(PROMPT, [100, 5, 6], GREEDY).produced == expected
        # What the refused draft left lies behind the rows that go on from there.
        context = [*PROMPT, expected[0].id]
        follow = calls.verify(context, [], GREEDY).produced
        assert calls.verify(context, [100, 100], GREEDY).produced == follow
        assert calls.verify(context, [], GREEDY).produced == follow


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_breaks_down_says_so_and_answers_everybody() -> None:
    told = threading.Event()
    with running_engine(CHECKPOINT, on_breakdown=told.set) as calls:
        calls.engine._scheduler.next_pass = lambda: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(EngineError):
            calls.verify(PROMPT, [], GREEDY)
        assert told.wait(60)
        calls.engine._thread.join()
        with pytest.raises(EngineError):
            calls.verify(PROMPT, [], GREEDY)


def test_calls_past_the_bound_are_refused() -> None:
    with running_engine(CHECKPOINT, kv_bytes=12 * BLOCK_BYTES) as calls:
        calls.engine._scheduler.admission._max_waiting = 3
        waiters = [Waiter() for _ in range(12)]
        for waiter in waiters:
            calls.engine.submit(draft_task(PROMPT, 300, GREEDY), waiter)
        refused = 0
        for waiter in waiters:
            try:
                waiter.wait()
            except QueueFullError:
                refused += 1
        assert 0 < refused < 12
        calls.engine._cache.check_integrity()
