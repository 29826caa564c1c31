"""A platform: what a kind of device brings with it. Its lanes, how they keep weights, what names its arithmetic.

Everything above asks the platform and nothing else which device it is on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from backend.kernels.linear import PackedWeight
from backend.kernels.ops import CPU_FAST, CPU_FIXED, Ops, Weight
from backend.settings import Device

Pack: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, torch.dtype, torch.dtype], Weight]
"""Prepares (weight [out_features, in_features], bias, the numerics' dtype, what products are rounded to)."""

Compute: TypeAlias = Callable[[], torch.Tensor]
Capture: TypeAlias = Callable[[Compute], Compute]
"""Records what a computation over tensors that stay in place does. What it returns does that again, into one tensor."""


class PlatformError(Exception):
    """A device that was asked for cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Platform:
    """`hardware` tells apart devices whose bits may differ. `capture` is None where launching costs nothing."""

    device: torch.device
    fast: Ops
    fixed: Ops
    pack: Pack
    hardware: str
    capture: Capture | None


CPU = Platform(
    device=torch.device("cpu"),
    fast=CPU_FAST,
    fixed=CPU_FIXED,
    pack=PackedWeight,
    hardware=torch.backends.cpu.get_cpu_capability(),
    capture=None,
)


def open_platform(device: Device) -> Platform:
    """The platform of a device. Raises PlatformError where this machine does not have it."""
    if device == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise PlatformError("device: cuda: PyTorch sees no CUDA device")
    try:
        # Only here: machines without a GPU need no Triton.
        from backend.kernels.cuda import cuda_platform  # noqa: PLC0415
    except ImportError as error:
        raise PlatformError(f"device: cuda: the kernels need Triton (the extra `cuda` brings it): {error}") from error
    return cuda_platform()
