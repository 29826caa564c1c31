"""The table of ops a lane is handed: all that tells the fast lane and the fixed lane apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from backend.kernels.attention import Layout, attention_fast, attention_fixed
from backend.kernels.elementwise import rms_norm, rope, swiglu_fast, swiglu_fixed
from backend.kernels.linear import linear_fast, linear_fixed
from backend.kernels.sampling import logprobs, sample

Weight: TypeAlias = Any
"""A linear layer's weight as the lanes of one platform keep it; what it is, is between its `pack` and its `linear`."""


@dataclass(frozen=True, slots=True)
class Ops:
    """One lane's arithmetic. Each op's shapes and dtypes are those of its docstring.

    `shape_invariant`: a row's bits do not depend on how many rows the pass has, so a pass may leave out the dummies
    that would fill its fixed shape.
    """

    name: str
    shape_invariant: bool
    linear: Callable[[torch.Tensor, Weight], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]
    sample: Callable[[torch.Tensor, Sequence[tuple[int, int]]], torch.Tensor]
    logprobs: Callable[[torch.Tensor], torch.Tensor]


CPU_FAST = Ops(
    name="cpu-fast",
    shape_invariant=False,
    linear=linear_fast,
    rms_norm=rms_norm,
    rope=rope,
    swiglu=swiglu_fast,
    attention=attention_fast,
    sample=sample,
    logprobs=logprobs,
)

CPU_FIXED = Ops(
    name="cpu-fixed",
    shape_invariant=True,
    linear=linear_fixed,
    rms_norm=rms_norm,
    rope=rope,
    swiglu=swiglu_fixed,
    attention=attention_fixed,
    sample=sample,
    logprobs=logprobs,
)
