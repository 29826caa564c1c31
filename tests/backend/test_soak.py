"""A small soak: random mixed traffic under memory pressure, and every verified answer again in a fresh process."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial

import torch

from backend.engine.engine import Engine
from backend.engine.kv_pool import RESERVED_BLOCKS, block_bytes
from backend.kernels.ops import CPU_FAST, CPU_FIXED, Ops
from backend.protocol import TokenizerFiles
from backend.settings import Dtype, EngineSettings
from benchmarks.alone import in_new_process
from benchmarks.soak import Report, soak
from benchmarks.soak_traffic import Mix
from tests.backend.harness import TINY, tiny_checkpoint
from tests.backend.tiny_models import VOCAB, tiny_tokenizer

CONFIG = replace(TINY, vocab_size=VOCAB)
TOKENIZER = TokenizerFiles(tiny_tokenizer().to_str(), None, [257], {})
MIX = Mix(seed=5, requests=30, clients=12, blocks=24, longest_prefix=150, longest_answer=40)


def build(dtype: Dtype, fixed: Ops) -> Engine:
    kv_bytes = (MIX.blocks + RESERVED_BLOCKS) * block_bytes(CONFIG, getattr(torch, dtype))
    settings = EngineSettings("tiny", dtype, 1, kv_bytes, verify_groups=4, verify_window=16)
    return Engine(tiny_checkpoint(config=CONFIG), settings, lambda share: None, fixed=fixed)


def run(dtype: Dtype, fixed: Ops, answers: int) -> Report:
    """In a process of its own: what other tests leave in memory would count as growth, or hide it."""
    enough = partial(operator.le, answers)
    return in_new_process(soak, partial(build, dtype, fixed), TOKENIZER, MIX, enough, sample_every_s=0.1)


def test_every_verified_answer_is_the_one_computed_alone(dtype: Dtype) -> None:
    report = run(dtype, CPU_FIXED, answers=120)
    assert report.faults == []
    assert report.answers >= 120 and report.tokens > 1500 and report.distinct_requests >= 25
    assert report.evictions > 100 and report.preemptions > 0
    kinds = ("cancellations", "poisoned", "decoded", "streams", "stray calls", "answers of a grammar")
    assert all(report.did[kind] > 0 for kind in kinds)


def test_a_lane_that_is_not_invariant_is_caught() -> None:
    """The fast lane's arithmetic passed off as the fixed lane's."""
    report = run("float32", replace(CPU_FAST, shape_invariant=True), answers=30)
    assert report.differing_answers > 0 and any("differ" in fault for fault in report.faults)
