"""The promise on the real model, across processes, threads and shapes; and that without it answers do differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backend.engine.checkpoint import Checkpoint
from backend.protocol import Sampling
from backend.settings import Device, Dtype
from tests.backend.harness import draft_task, running_engine

pytestmark = pytest.mark.slow


def answer_of_a_process(
    dtype: Dtype, threads: int, groups: int, window: int, drafted: int, device: Device = "cpu", **variables: str
) -> tuple[str, str]:
    """Fingerprint and digest of the answers of a fresh process."""
    command = [
        sys.executable,
        "-m",
        "tests.backend.answer_digest",
        dtype,
        *map(str, (threads, groups, window, drafted)),
        device,
    ]
    # Waiting threads that spin starve each other where cores are shared; it has no bearing on bits.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | variables
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    fingerprint, digest = output.split()
    return fingerprint, digest


def test_processes_threads_and_shapes_give_the_same_bits(dtype: Dtype) -> None:
    answers = {
        (threads, groups, window): answer_of_a_process(dtype, threads, groups, window, drafted)
        for threads, groups, window, drafted in [(1, 4, 32, 15), (2, 4, 32, 31), (1, 1, 16, 15), (1, 8, 64, 63)]
    }
    assert len(set(answers.values())) == 1, answers


def test_another_instruction_set_holds_the_promise_under_another_fingerprint() -> None:
    """oneDNN held to AVX2: bfloat16 numerics over float32 products."""
    narrow = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    first = answer_of_a_process("bfloat16", 1, 4, 32, 15, **narrow)
    assert answer_of_a_process("bfloat16", 1, 1, 16, 7, **narrow) == first
    fingerprint, digest = answer_of_a_process("bfloat16", 1, 4, 32, 15)
    assert (digest == first[1]) or (fingerprint != first[0])


def test_without_verification_logprobs_change_with_the_company(smollm2: Checkpoint, dtype: Dtype) -> None:
    """The other direction: the same fast-lane question alone and in a batch."""
    greedy = Sampling(temperature=0.0)
    with running_engine(smollm2, dtype, kv_bytes=1 << 29) as calls:
        prompt = [1, *range(500, 520)]
        alone = draft_task(prompt, 48, greedy)
        calls.run(alone)
        crowd = [draft_task([1, *range(600 + i, 610 + 9 * i)], 60, greedy) for i in range(7)]
        together = draft_task(prompt, 48, greedy)
        calls.run(*crowd, together)
    assert [t.logprob for t in alone.produced] != [t.logprob for t in together.produced]
