"""Recorded passes on a CPU, where "recorded" means computed again over the same tensors: all but the recording."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend.engine.kv_pool import KvPool
from backend.engine.model import Model
from backend.engine.pass_graphs import PassGraphs
from backend.kernels.attention import BLOCK, Layout
from backend.kernels.ops import CPU_FIXED
from backend.kernels.platform import CPU, Compute
from backend.protocol import Sampling, VerifyShape
from backend.settings import Dtype
from tests.backend.harness import TINY, Calls, running_engine, tiny_checkpoint, verify_task


class Recorder:
    """Computes again, and counts how often."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, compute: Compute) -> Compute:
        compute()  # What is recorded runs once, over dummies.

        def replay() -> torch.Tensor:
            self.replays += 1
            return compute()

        return replay


def _answers(calls: Calls) -> list[list[tuple[int, float]]]:
    prompts = [list(range(3, 3 + length)) for length in (5, 70, 130)]
    drafted = [calls.complete(prompt, 20, Sampling(temperature=1.0, seed=7), (15, 3)) for prompt in prompts]
    decoded = [calls.decode(prompt, 20, Sampling(temperature=1.0, seed=7), (9,)) for prompt in prompts]
    assert drafted == decoded
    crowd = [verify_task(prompt, [1] * 15, Sampling(temperature=0.0)) for prompt in prompts]
    calls.run(*crowd)
    return [*drafted, *([(token.id, token.logprob) for token in task.produced] for task in crowd)]


def test_recorded_passes_give_the_same_bits(dtype: Dtype) -> None:
    checkpoint = tiny_checkpoint()
    with running_engine(checkpoint, dtype, groups=4, window=16) as calls:
        expected, fingerprint = _answers(calls), calls.engine.info.fingerprint
    recorder = Recorder()
    with running_engine(checkpoint, dtype, groups=4, window=16, platform=replace(CPU, capture=recorder)) as calls:
        before = recorder.replays
        assert _answers(calls) == expected
        assert recorder.replays > before
        assert calls.engine.info.fingerprint == fingerprint


@pytest.fixture(scope="module")
def graphs() -> PassGraphs:
    model = Model(tiny_checkpoint(), torch.float32, lambda share: None)
    kv = KvPool(TINY, torch.float32, 4)
    return PassGraphs(model, kv, {"fast": CPU_FIXED, "fixed": CPU_FIXED}, VerifyShape(4, 16), lambda compute: compute)


@pytest.mark.parametrize(
    ("lane", "counts", "shape"),
    [
        ("fast", [1], VerifyShape(1, 1)),
        ("fast", [1] * 3, VerifyShape(4, 1)),
        ("fast", [1] * 33, VerifyShape(64, 1)),
        ("fast", [1] * 65, None),
        ("fast", [16] * 4, None),
        ("fixed", [1] * 5, VerifyShape(8, 1)),
        ("fixed", [16] * 4, VerifyShape(4, 16)),
        ("fixed", [16, 15, 1], VerifyShape(4, 16)),
        ("fixed", [16, 15], None),
        ("fixed", [17, 16, 16], None),
        ("fixed", [9] * 5, None),
    ],
)
def test_a_pass_takes_the_smallest_shape_that_is_not_much_larger(
    graphs: PassGraphs, lane: str, counts: list[int], shape: VerifyShape | None
) -> None:
    assert graphs.shape_for(lane, counts) == shape  # type: ignore[arg-type]


@torch.inference_mode()
def test_a_pass_sees_nothing_of_the_one_before() -> None:
    """Its table ends in zeros, not in the blocks of a longer sequence, whose values may be anything."""
    model = Model(tiny_checkpoint(), torch.float32, lambda share: None)
    kv = KvPool(TINY, torch.float32, 4)
    graphs = PassGraphs(model, kv, {"fixed": CPU_FIXED}, VerifyShape(2, 4), lambda compute: compute)

    def decode(position: int, table: list[int]) -> torch.Tensor:
        at = torch.tensor([position])
        slot = at % BLOCK + table[position // BLOCK] * BLOCK
        layout = Layout(at, slot, torch.tensor([table]), at, width=1)
        return graphs.hidden("fixed", VerifyShape(1, 1), torch.tensor([7]), layout).clone()

    alone = decode(0, [2])
    for values in kv.values:
        values[4] = float("nan")
    assert decode(BLOCK, [3, 4]).isnan().any()
    assert torch.equal(decode(0, [2]), alone)
