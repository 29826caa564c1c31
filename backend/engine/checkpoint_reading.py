"""What the loaders of all formats share: typed keys, weights checked by shape and copied, a digest of files.

Owns the rule that whatever is wrong with a file becomes a CheckpointError which names the file and the key or tensor.
Knows no format: a loader tells what its format calls a weight and how to read one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.checkpoint import CheckpointError, ModelConfig


@dataclass(frozen=True, slots=True)
class Keys:
    """Metadata whose values are checked as they are read. A key that holds None counts as absent.

    Each reader returns `default` for an absent key and refuses one that has no default.
    """

    file: str
    values: Mapping[str, object]

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def refuse(self, key: str, why: str) -> CheckpointError:
        """The error for what `key` holds; `why` goes on from "<key> is <value>"."""
        value = repr(self.values.get(key))
        return CheckpointError(f"{self.file}: {key} is {value if len(value) < 80 else value[:80] + '...'}{why}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f", expected an integer of {least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; no key read here may be zero."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refuse(key, ", expected a positive number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, ", expected a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, ", expected true or false")
        return value

    def section(self, key: str) -> Keys:
        """The keys nested under `key`; empty where it is absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refuse(key, ", expected an object")
        return Keys(f"{self.file}: {key}", value)

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, ", expected a list of strings")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.file}: {key} is missing")
        return default


def check_shape(
    keys: Keys, config: ModelConfig, tensors: int, *, layers_key: str, heads_key: str, kv_heads_key: str
) -> ModelConfig:
    """Refuse a shape that no model has, or that no model of so many tensors has."""
    if config.layers > tensors:
        raise keys.refuse(layers_key, f", but there are only {tensors} tensors")
    if config.heads % config.kv_heads:
        raise keys.refuse(kv_heads_key, f", which does not divide {heads_key} ({config.heads})")
    if config.head_dim % 2:
        raise CheckpointError(f"{keys.file}: the head size is {config.head_dim}, expected an even number")
    return config


def weight_shapes(config: ModelConfig, *, tied: bool, biases: bool, qk_norms: bool) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of a model, in the order of the layers."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "mlp_norm": (hidden,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    if biases:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if qk_norms:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not tied:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def float32_copy(values: npt.NDArray[np.float32] | torch.Tensor) -> torch.Tensor:
    """The values as float32 in memory of their own, at a multiple of 64 bytes.

    A tensor that stays in the mapped file starts wherever the file puts it, and some matrix kernels give other bits for
    other alignments.
    """
    copy = torch.empty(tuple(values.shape), dtype=torch.float32)
    if isinstance(values, torch.Tensor):
        copy.copy_(values)
    else:
        np.copyto(copy.numpy(), values)
    assert copy.data_ptr() % 64 == 0
    return copy


def digest_files(files: Iterable[Path], on_share: Callable[[float], None]) -> str:
    """SHA-256 of what `sha256sum` prints for these files in the order of their names, run in their folder."""
    ordered = sorted(files, key=lambda file: file.name)
    listing = hashlib.sha256()
    for done, file in enumerate(ordered, start=1):
        try:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        listing.update(f"{digest}  {file.name}\n".encode())
        on_share(done / len(ordered))
    return listing.hexdigest()
