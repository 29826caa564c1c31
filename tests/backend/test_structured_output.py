"""Grammars in the engine: what is said belongs to them, and nothing but the sequence decides what is said."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest
import torch

from backend.engine.admission import Changes
from backend.engine.engine import EngineError
from backend.engine.grammar import Compiler
from backend.engine.kv_pool import block_bytes
from backend.engine.tasks import DecodeTask, Scored, Task
from backend.kernels.adjust import Past, adjust
from backend.kernels.ops import CPU_FIXED
from backend.kernels.sampling import Draw, choose
from backend.protocol import Grammar, Sampling, TokenizerFiles
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
from tests.backend.random_schema import check, random_schema
from tests.backend.tiny_models import VOCAB, tiny_tokenizer

EOS = 257
STOP = frozenset({EOS})
TOKENIZER = tiny_tokenizer()
COMPILER = Compiler(TokenizerFiles(TOKENIZER.to_str(), None, [EOS], {}), VOCAB)
CONFIG = replace(TINY, vocab_size=VOCAB)
CHECKPOINT = tiny_checkpoint(config=CONFIG)
BLOCK_BYTES = block_bytes(CONFIG, torch.bfloat16)
PROMPT = [7, 200, 21, 21, 5, 88, 130, 2, 14]
LONG = [(7 * i * i + 3 * i) % VOCAB for i in range(150)]
LIMIT = 48

NAMED = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 12},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 4},
            "kind": {"enum": ["the inn", "thin", None]},
        },
        "required": ["name", "ages", "kind"],
        "additionalProperties": False,
    }
)
GRAMMARS = [
    Grammar("json_schema", NAMED),
    Grammar("json_schema", '{"type":"object"}'),
    Grammar("regex", r"((the |in|[a-f]{2,5})[,;] ?){3,12}(yes|no)"),
]
SAMPLINGS = [
    Sampling(temperature=0.0, grammar=GRAMMARS[0]),
    Sampling(temperature=1.0, seed=1, grammar=GRAMMARS[0]),
    Sampling(temperature=0.9, top_p=0.9, seed=42, frequency_penalty=1.5, repetition_penalty=1.2, grammar=GRAMMARS[1]),
    Sampling(temperature=1.0, top_k=40, seed=7, logit_bias=((5, 4.0), (EOS, -20.0)), grammar=GRAMMARS[2]),
]
Answer = list[tuple[int, float]]


class Constrained(Calls):
    """Calls whose grammars are compiled, and whose sequences end."""

    def run(self, *tasks: Task) -> None:
        for task in tasks:
            self.constrain(task)
        super().run(*tasks)

    @staticmethod
    def constrain(task: Task) -> Task:
        grammar = task.sampling.grammar
        if grammar is not None and task.constraint is None:
            task.constraint = COMPILER.compile(grammar).constrain(task.stop_ids)
        return task

    def answer(self, prompt: list[int], sampling: Sampling, window: Callable[[Answer], Sequence[Scored]]) -> Answer:
        """Up to LIMIT tokens, or to the end, in windows."""
        done: Answer = []
        while len(done) < LIMIT and not (done and done[-1][0] in STOP):
            done += [(token.id, token.logprob) for token in window(done)]
        return done[:LIMIT]

    def plain(self, prompt: list[int], sampling: Sampling) -> Answer:
        """Decoding in the fixed lane alone, one token a call."""
        return self.answer(prompt, sampling, lambda done: self.verified(prompt, done, [], sampling))

    def drafted(self, prompt: list[int], sampling: Sampling, windows: Sequence[int]) -> Answer:
        def window(done: Answer) -> Sequence[Scored]:
            if not done:
                return self.verified(prompt, done, [], sampling)
            count = windows[len(done) % len(windows)]
            task = draft_task([*prompt, *_ids(done)], count, sampling, STOP, len(done))
            self.run(task)
            return self.verified(prompt, done, [token.id for token in task.produced], sampling)

        return self.answer(prompt, sampling, window)

    def decoded(self, prompt: list[int], sampling: Sampling, lengths: Sequence[int]) -> Answer:
        def window(done: Answer) -> Sequence[Scored]:
            task = decode_task([*prompt, *_ids(done)], lengths[len(done) % len(lengths)], sampling, STOP, len(done))
            self.run(task)
            return task.produced

        return self.answer(prompt, sampling, window)

    def verified(self, prompt: list[int], done: Answer, draft: list[int], sampling: Sampling) -> Sequence[Scored]:
        task = verify_task([*prompt, *_ids(done)], draft, sampling, stop=STOP, generated=len(done))
        self.run(task)
        return task.produced

    def streamed(self, prompt: list[int], sampling: Sampling, count: int) -> DecodeTask:
        task = DecodeTask(prompt, count, sampling, STOP, top=0, is_draft=False)
        self.run(task)
        return task


def _ids(answer: Answer) -> list[int]:
    return [id_ for id_, _ in answer]


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def reference(calls: Constrained, prompt: list[int], sampling: Sampling) -> list[int]:
    """The model's own logits, adjusted and masked by hand, with a matcher of its own for each token."""
    assert sampling.grammar is not None
    unmasked = msgspec.structs.replace(sampling, grammar=None)
    bare = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
    done: list[int] = []
    while len(done) < LIMIT and not (done and done[-1] in STOP):
        task = verify_task(prompt + done, [], Sampling(temperature=0.0), top=VOCAB)
        task.top_as_logprobs = False
        calls.run(task)
        row = torch.tensor([s.score for s in sorted(task.produced[0].top, key=lambda score: score.id)])
        adjust(row, unmasked, Past(prompt + done, len(done), STOP))
        allowed = COMPILER.compile(sampling.grammar).constrain(STOP).allowed(done)
        assert allowed is not None
        for id_ in range(VOCAB):
            if not allowed[id_ // 8] >> id_ % 8 & 1:
                row[id_] = -1e35
        done.append(int(choose(row[None], [Draw(bare, len(prompt) + len(done))])[0]))
    return done


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def calls(request: pytest.FixtureRequest) -> Iterator[Constrained]:
    with running_engine(CHECKPOINT, request.param, kv_bytes=120 * BLOCK_BYTES) as running:
        yield Constrained(running.engine)
        running.engine._cache.check_integrity()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_windows_and_decoding_give_what_masking_by_hand_gives(calls: Constrained, sampling: Sampling) -> None:
    for prompt in (PROMPT, LONG):
        expected = calls.plain(prompt, sampling)
        assert _ids(expected) == reference(calls, prompt, sampling)
        free = decode_task(prompt, 5, msgspec.structs.replace(sampling, grammar=None), STOP)
        calls.run(free)
        assert _ids(expected)[:5] != [token.id for token in free.produced], "nothing was masked: this proves nothing"
        for windows in [(1,), (16,), (3, 11, 1, 40)]:
            assert calls.drafted(prompt, sampling, windows) == expected
        for lengths in [(7,), (1, 30)]:
            assert calls.decoded(prompt, sampling, lengths) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_refused_drafts_leave_no_trace(calls: Constrained, sampling: Sampling) -> None:
    """Drafts right up to a token and wrong behind it: not of the grammar, of it, ended, or going on behind an end."""
    expected = calls.plain(PROMPT, sampling)
    ids = _ids(expected)
    rng = random.Random(5)

    def window(done: Answer) -> Sequence[Scored]:
        right = ids[len(done) : len(done) + rng.randint(0, 6)]
        wrong = rng.choice(
            [
                [rng.randrange(VOCAB) for _ in range(20)],
                list(TOKENIZER.encode('{"name": "other", "ages": [1').ids),
                [EOS, *ids[:5]],
                [VOCAB - 1, EOS],
                ids[-12:],
            ]
        )
        draft = right + wrong
        return calls.verified(PROMPT, done, draft[: 1 + draft.index(EOS) if EOS in draft else None], sampling)

    for _ in range(3):
        assert calls.answer(PROMPT, sampling, window) == expected


def test_drafts_that_go_on_behind_an_end_are_survived(calls: Constrained) -> None:
    """No gateway of ours sends them; the rows behind the end choose freely, and their choice never stands."""
    sampling = Sampling(temperature=0.0, grammar=Grammar("regex", "ab"))
    (first, second) = TOKENIZER.encode("ab").ids
    task = verify_task(PROMPT, [first, second, EOS, first, VOCAB - 1, EOS], sampling, stop=STOP)
    calls.run(task)
    assert [token.id for token in task.produced] == [first, second, EOS]
    assert (task.agreed, task.finish) == (3, "stop")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_drafts_of_a_grammar_are_worth_something(calls: Constrained, sampling: Sampling) -> None:
    task = draft_task(PROMPT, 12, sampling, STOP)
    calls.run(task)
    draft = [token.id for token in task.produced]
    verdict = verify_task(PROMPT, draft, sampling, stop=STOP)
    calls.run(verdict)
    assert verdict.agreed >= len(draft) // 2


def test_other_slots_and_company_change_nothing(calls: Constrained) -> None:
    prompts = [PROMPT, LONG, LONG[:63], PROMPT[:1]]
    alone = [calls.plain(prompt, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
    answers: dict[int, Answer] = {}

    def ask(index: int) -> None:
        way = calls.drafted if index % 2 else calls.decoded
        answers[index] = way(prompts[index % 4], SAMPLINGS[index % 4], (1 + index, 5))

    # Streams in the same passes, with a grammar and without.
    crowd = [Constrained.constrain(DecodeTask(PROMPT[: 1 + i], 80, SAMPLINGS[i], STOP, 0, False)) for i in range(4)]
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


def test_many_random_schemas_are_kept_to(calls: Constrained) -> None:
    rng = random.Random(3)
    finished = 0
    for seed in range(40):
        schema = random_schema(rng)
        sampling = Sampling(temperature=1.0, seed=seed, grammar=Grammar("json_schema", json.dumps(schema)))
        if seed % 3:
            task = calls.streamed(PROMPT, sampling, 200)
            ids, finish = [token.id for token in task.produced], task.finish
        else:
            whole = decode_task(PROMPT, 200, sampling, STOP)
            calls.run(whole)
            ids, finish = [token.id for token in whole.produced], whole.finish
        if finish == "stop":
            assert ids[-1] == EOS
            check(text_of(ids[:-1]), schema)
            finished += 1
    assert finished >= 30, "too few came to an end to prove much"


@pytest.mark.parametrize("pattern", [r"(yes|no|maybe)", r"[a-z]{3,8}-\d{2}", r"(the|in){1,4}\n[^a-z]", r"é+(ü|日本)?x"])
def test_regular_expressions_are_kept_to(calls: Constrained, pattern: str) -> None:
    texts = set()
    for seed in range(12):
        # Hot enough for the few ways there are to differ.
        task = calls.streamed(PROMPT, Sampling(temperature=6.0, seed=seed, grammar=Grammar("regex", pattern)), 200)
        assert task.finish == "stop"
        texts.add(text_of([token.id for token in task.produced[:-1]]))
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1


def test_an_answer_that_is_cut_says_so(calls: Constrained) -> None:
    sampling = Sampling(temperature=0.0, grammar=Grammar("regex", "a{50}"))
    task = calls.streamed(PROMPT, sampling, 20)
    assert (task.finish, text_of([token.id for token in task.produced])) == (None, "a" * 20)
    task = calls.streamed(PROMPT, sampling, 60)
    assert (task.finish, text_of([token.id for token in task.produced[:-1]])) == ("stop", "a" * 50)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_grammar_wins_over_the_minimum(calls: Constrained, temperature: float) -> None:
    """The minimum holds an end back where the grammar leaves anything else, and no longer."""
    for pattern, least in (("ab", 2), ("ab*", 9), ("ab{0,4}", 5)):
        sampling = Sampling(temperature=temperature, min_tokens=9, grammar=Grammar("regex", pattern))
        biased = msgspec.structs.replace(sampling, logit_bias=((EOS, 100.0),))
        task = calls.streamed(PROMPT, biased, 40)
        assert len(task.produced) - 1 == least and task.finish == "stop"
        assert _ids(calls.plain(PROMPT, biased)) == [token.id for token in task.produced]


def test_logprobs_are_those_of_the_models_own_logits(calls: Constrained) -> None:
    raw = verify_task(PROMPT, [], Sampling(temperature=0.0), top=20)
    masked = verify_task(PROMPT, [], Sampling(temperature=0.0, grammar=GRAMMARS[1]), top=20, stop=STOP)
    calls.run(raw, masked)
    (free,), (bound,) = raw.produced, masked.produced
    assert free.id != bound.id == TOKENIZER.token_to_id("{")
    assert (bound.top, bound.margin) == (free.top, free.margin) and bound.logprob < free.logprob


def test_a_text_that_becomes_too_complex_fails_alone(calls: Constrained) -> None:
    waiter, others = Waiter(), [Waiter() for _ in range(3)]
    grammar = Grammar("regex", "(?:(?:a?){100}){100}")
    bias = ((TOKENIZER.token_to_id("a"), 100.0),)
    bad = DecodeTask(PROMPT, 200, Sampling(temperature=0.0, logit_bias=bias, grammar=grammar), STOP, 0, False)
    calls.engine.submit(Constrained.constrain(bad), waiter)
    good = [Constrained.constrain(DecodeTask(PROMPT, 60, sampling, STOP, 0, False)) for sampling in SAMPLINGS[:3]]
    for task, other in zip(good, others, strict=True):
        calls.engine.submit(task, other)
    with pytest.raises(EngineError, match="lexer error"):
        waiter.wait()
    for other in others:
        other.wait()


def test_preempted_streams_go_on_in_the_grammar() -> None:
    sampling = Sampling(temperature=1.0, seed=3, grammar=Grammar("regex", "([a-f]{3} ){20,60}(the|in)+"))
    prompts = [[i, i, i] for i in range(20)]
    with running_engine(CHECKPOINT, fast=CPU_FIXED) as running:
        roomy = Constrained(running.engine)
        whole = [decode_task(prompt, 150, sampling, STOP) for prompt in prompts]
        roomy.run(*whole)
        expected = [[token.id for token in task.produced] for task in whole]
    with running_engine(CHECKPOINT, fast=CPU_FIXED, kv_bytes=14 * BLOCK_BYTES) as running:
        tight = Constrained(running.engine)
        admission = tight.engine._scheduler.admission
        make_room, preempted = admission.make_room, list[Task]()

        def observed(streams: Sequence[DecodeTask]) -> Changes:
            changes = make_room(streams)
            preempted.extend(task for task in changes.preempted if task.produced)
            return changes

        admission.make_room = observed  # type: ignore[method-assign]
        streams = [DecodeTask(prompt, 150, sampling, STOP, top=0, is_draft=False) for prompt in prompts]
        tight.run(*streams)
        assert preempted, "this proves nothing"
        assert [[token.id for token in stream.produced] for stream in streams] == expected


def digest(dtype: Dtype, windows: Sequence[int]) -> str:
    """Of the ids and logprobs of four answers from an engine of its own."""
    with running_engine(CHECKPOINT, dtype) as running:
        calls = Constrained(running.engine)
        answers = [calls.drafted(LONG, sampling, windows) for sampling in SAMPLINGS]
    return hashlib.sha256(repr([[(id_, logprob.hex()) for id_, logprob in a] for a in answers]).encode()).hexdigest()


def test_another_process_gives_the_same_bits(calls: Constrained) -> None:
    dtype = calls.engine.info.dtype
    code = f"from tests.backend.test_structured_output import digest; print(digest({dtype!r}, (5, 2)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == digest("float32" if dtype == "float32" else "bfloat16", (9,))
