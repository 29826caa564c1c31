"""The probe passes on arithmetic that holds, and names the invariant of arithmetic that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend.kernels.attention import Layout, attention_fixed
from backend.kernels.elementwise import rms_norm, swiglu_fixed
from backend.kernels.linear import PackedWeight, linear_fixed
from backend.kernels.ops import CPU_FIXED, Ops
from backend.settings import Dtype
from tests.backend.harness import running_engine, tiny_checkpoint

CHECKPOINT = tiny_checkpoint()


def test_the_fixed_lane_passes(dtype: Dtype) -> None:
    with running_engine(CHECKPOINT, dtype) as calls:
        assert calls.engine.info.roles == ["draft", "verify", "decode"] and calls.engine.refusal is None


def _by_rows(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return linear_fixed(x, weight) * (1 + len(x) % 2 * 1e-6)


def _by_place(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return linear_fixed(x, weight) * (1 + torch.arange(len(x))[:, None] * 1e-7)


def _norm_by_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, eps) * (1 + len(x) % 2 * 1e-6)


def _swiglu_by_rows(gate_up: torch.Tensor) -> torch.Tensor:
    return swiglu_fixed(gate_up) * (1 + len(gate_up) % 2 * 1e-6)


def _by_padding(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    return attention_fixed(q, keys, values, layout) * (1 + layout.tables.shape[0] * 1e-6)


@pytest.mark.parametrize(
    ("broken", "invariant", "op"),
    [
        (replace(CPU_FIXED, linear=_by_rows), "offset", "linear (call 2 of"),
        (replace(CPU_FIXED, linear=_by_place), "offset", "linear (call 2 of"),
        (replace(CPU_FIXED, rms_norm=_norm_by_rows), "offset", "rms_norm (call 1 of"),
        (replace(CPU_FIXED, attention=_by_padding), "company", "attention (call 5 of"),
        (replace(CPU_FIXED, swiglu=_swiglu_by_rows), "offset", "swiglu (call 9 of"),
        (replace(CPU_FIXED, shape_invariant=False, linear=_by_place), "offset", "linear (call 2 of"),
    ],
)
def test_broken_arithmetic_is_refused_by_name(broken: Ops, invariant: str, op: str) -> None:
    with running_engine(CHECKPOINT, "float32", fixed=broken) as calls:
        assert calls.engine.info.roles == ["draft"]
        assert calls.engine.refusal is not None and invariant in calls.engine.refusal and op in calls.engine.refusal


def _by_many_rows(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return linear_fixed(x, weight) * (1 + (len(x) > 160) * 1e-6)


def test_a_pass_of_as_many_rows_as_prompts_share_is_checked() -> None:
    broken = replace(CPU_FIXED, linear=_by_many_rows)
    with running_engine(CHECKPOINT, "float32", groups=8, window=32, fixed=broken) as calls:
        assert calls.engine.refusal is not None and "linear (call 2 of" in calls.engine.refusal
    # Fewer than that are in no pass of prompts, nor of windows.
    with running_engine(CHECKPOINT, "float32", groups=4, window=32, fixed=broken) as calls:
        assert calls.engine.refusal is None


def test_the_fingerprint_names_what_the_bits_depend_on() -> None:
    def fingerprint(seed: int = 0, dtype: Dtype = "float32", **options: object) -> str:
        with running_engine(tiny_checkpoint(seed), dtype, **options) as calls:  # type: ignore[arg-type]
            return calls.engine.info.fingerprint

    base = fingerprint()
    assert fingerprint() == base
    assert fingerprint(threads=2) == base
    assert fingerprint(groups=2, window=9) == base, "the shape does not matter to arithmetic that ignores it"
    assert fingerprint(seed=1) != base
    assert fingerprint(dtype="bfloat16") != base
    shaped = replace(CPU_FIXED, shape_invariant=False)
    assert fingerprint(fixed=shaped) != fingerprint(fixed=shaped, window=9)
