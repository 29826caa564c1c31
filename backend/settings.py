"""What an engine backend can be told, read once at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]

WINDOW: dict[Device, int] = {"cpu": 32, "cuda": 64}
"""Rows of each request in one verification pass, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`kv_bytes` bounds the KV cache; the rest of the memory is the weights'. `threads` are OpenMP threads.

    `device` "cuda" is the current CUDA or ROCm device of the process.
    """

    model: str
    dtype: Dtype
    threads: int
    kv_bytes: int
    verify_groups: int
    verify_window: int
    max_waiting: int = 256
    device: Device = "cpu"
