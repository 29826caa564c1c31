"""Passes of CUDA's lanes over a device without memory or arithmetic: whatever a kernel is given is on that device.

Stands in for a GPU where there is none. PyTorch refuses to mix the "meta" device with the host, as it does with a GPU;
Triton would not, so its launches are looked at here.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from triton.runtime.jit import JITFunction

from backend.engine.kv_pool import KvPool
from backend.engine.measure import MEASURE_BLOCKS
from backend.engine.model import Model
from backend.engine.prefix_cache import Lease
from backend.engine.runner import Runner
from backend.engine.scheduler import Pass, Span
from backend.kernels.cuda import CUDA_FAST, CUDA_FIXED
from backend.kernels.dense import DenseWeight
from backend.kernels.platform import Compute, Platform
from backend.protocol import Sampling, VerifyShape
from tests.backend.harness import TINY, tiny_checkpoint, verify_task

META = torch.device("meta")


def _again(compute: Compute) -> Compute:
    return compute


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("lane", ["fast", "fixed"])
@pytest.mark.parametrize("counts", [[1] * 3, [16] * 4, [40, 2]])
def test_a_pass_stays_on_its_device(
    monkeypatch: pytest.MonkeyPatch, lane: Any, counts: list[int], recorded: bool
) -> None:
    launched: Counter[str] = Counter()

    def run(kernel: Any, *args: object, grid: object, warmup: bool, **options: object) -> None:
        for argument in args:
            assert not isinstance(argument, torch.Tensor) or argument.device == META
        launched[kernel.fn.__name__] += 1

    monkeypatch.setattr(JITFunction, "run", run)
    platform = Platform(META, CUDA_FAST, CUDA_FIXED, partial(DenseWeight, device=META), "none", None)
    model = Model(tiny_checkpoint(), torch.bfloat16, lambda share: None, platform)
    kv = KvPool(TINY, torch.bfloat16, MEASURE_BLOCKS, META)
    runner = Runner(model, kv, CUDA_FAST, CUDA_FIXED, VerifyShape(4, 16), _again if recorded else None)
    launched.clear()
    logits = runner.forward(Pass(lane, [_span(count) for count in counts]))
    assert logits.device == META and logits.dtype == torch.float32
    assert logits.shape == (sum(counts), TINY.vocab_size)
    # Nothing but products and the attention of prompts is left to PyTorch.
    assert launched["swiglu_kernel"] == TINY.layers
    assert launched["rms_norm_kernel"] == 2 * TINY.layers + 1
    assert launched["rope_kernel"] == 2 * TINY.layers
    assert launched["linear_kernel"] == (4 * TINY.layers + 1 if lane == "fixed" else 0)
    assert launched["attention_kernel"] == (TINY.layers if lane == "fixed" or max(counts) == 1 else 0)


def _span(count: int) -> Span:
    task = verify_task(list(range(100)), [], Sampling(temperature=0.0))
    task.lease = Lease([2, 3], cached=0, fixed=0, fresh=[], copy=None, shared=[])
    return Span(task, 100 - count, count, choices=count)
