"""The promise on a GPU, on the real model: recorded passes, shapes, processes. Skipped where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from backend.engine.checkpoint import Checkpoint
from backend.kernels.platform import PlatformError, open_platform
from backend.protocol import Sampling
from backend.settings import Dtype
from tests.backend.answer_digest import PROMPTS, SAMPLINGS
from tests.backend.harness import draft_task, running_engine
from tests.backend.test_smollm2_bits import answer_of_a_process

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Answers = list[list[tuple[int, float]]]


def _answers(checkpoint: Checkpoint, dtype: Dtype, drafted: int, **options: object) -> tuple[Answers, Answers]:
    """Verified answers, drafted and decoded."""
    with running_engine(checkpoint, dtype, kv_bytes=1 << 30, **options) as calls:  # type: ignore[arg-type]
        assert calls.engine.refusal is None
        cases = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        return (
            [calls.complete(prompt, 40, sampling, (drafted,)) for prompt, sampling in cases],
            [calls.decode(prompt, 40, sampling, (drafted,)) for prompt, sampling in cases],
        )


@pytest.mark.gpu
@on_a_gpu
def test_shapes_ways_and_recorded_passes_give_the_same_bits(smollm2: Checkpoint, dtype: Dtype) -> None:
    platform = open_platform("cuda")
    drafted, decoded = _answers(smollm2, dtype, 63, groups=8, window=64, platform=platform)
    assert decoded == drafted
    unrecorded = replace(platform, capture=None)
    assert _answers(smollm2, dtype, 15, groups=1, window=16, platform=unrecorded) == (drafted, drafted)


@pytest.mark.gpu
@on_a_gpu
def test_two_processes_give_the_same_bits(dtype: Dtype) -> None:
    assert len({answer_of_a_process(dtype, 1, 8, 64, drafted, device="cuda") for drafted in (15, 63)}) == 1


@pytest.mark.gpu
@on_a_gpu
def test_without_verification_logprobs_change_with_the_company(smollm2: Checkpoint) -> None:
    """The other direction: the same fast-lane question alone and in a batch."""
    greedy = Sampling(temperature=0.0)
    with running_engine(smollm2, "bfloat16", kv_bytes=1 << 30, platform=open_platform("cuda")) as calls:
        prompt = [1, *range(500, 520)]
        alone = draft_task(prompt, 48, greedy)
        calls.run(alone)
        crowd = [draft_task([1, *range(600 + i, 610 + 9 * i)], 60, greedy) for i in range(31)]
        together = draft_task(prompt, 48, greedy)
        calls.run(*crowd, together)
    assert [token.logprob for token in alone.produced] != [token.logprob for token in together.produced]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(PlatformError, match="device: cuda: PyTorch sees no CUDA device"):
        open_platform("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_line_refuses_it_before_it_serves() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "backend.server", "--port", "0", "--device", "cuda"], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "PyTorch sees no CUDA device" in result.stderr
