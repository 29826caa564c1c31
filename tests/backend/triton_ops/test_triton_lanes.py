"""The lanes of a GPU, interpreted on a CPU where there is none: a whole engine over them, by the usual interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from backend.kernels.cuda import CUDA_FAST, CUDA_FIXED, cuda_platform
from backend.kernels.dense import DenseWeight
from backend.kernels.platform import Platform
from backend.kernels.triton_ops.launch import INTERPRETED
from backend.protocol import Sampling
from tests.backend.harness import TINY, Calls, running_engine, tiny_checkpoint, verify_task

CPU = torch.device("cpu")
ON_A_CPU = Platform(
    device=CPU,
    fast=CUDA_FAST,
    fixed=CUDA_FIXED,
    pack=partial(DenseWeight, device=CPU),
    hardware="interpreter",
    capture=None,
)
PLATFORM = ON_A_CPU if INTERPRETED.value else cuda_platform()
# Each matrix fits into a tile or two: the interpreter is slow.
SMALL = replace(
    TINY, vocab_size=120, hidden_size=36, intermediate_size=50, layers=1, heads=3, kv_heads=1, max_position=32
)
CHECKPOINT = tiny_checkpoint(config=SMALL)
PROMPT = list(range(3, 20))
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.9, seed=5)]


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    with running_engine(CHECKPOINT, "float32", groups=2, window=16, platform=PLATFORM) as calls:
        yield calls


def test_the_probe_passes(calls: Calls) -> None:
    assert calls.engine.refusal is None
    assert "verify" in calls.engine.info.roles


def test_drafted_and_decoded_answers_are_equal(calls: Calls) -> None:
    for sampling in SAMPLINGS:
        assert calls.complete(PROMPT, 5, sampling, (3,)) == calls.decode(PROMPT, 5, sampling, (3,))


def test_it_answers_as_the_cpus_own_lanes_do(calls: Calls) -> None:
    """Other arithmetic, so other bits; but the same model."""
    task = verify_task(PROMPT, [7, 8], Sampling(temperature=0.0), top=3)
    calls.run(task)
    with running_engine(CHECKPOINT, "float32", groups=2, window=16) as own:
        expected = verify_task(PROMPT, [7, 8], Sampling(temperature=0.0), top=3)
        own.run(expected)
    assert [token.id for token in task.produced] == [token.id for token in expected.produced]
    for ours, theirs in zip(task.produced, expected.produced, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [top.id for top in ours.top] == [top.id for top in theirs.top]
