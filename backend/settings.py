"""What an engine backend can be told, read once at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`kv_bytes` bounds the KV cache; the rest of the memory is the weights'. `threads` are OpenMP threads."""

    model: str
    dtype: Dtype
    threads: int
    kv_bytes: int
    verify_groups: int
    verify_window: int
    max_waiting: int = 256
