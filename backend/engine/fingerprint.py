"""The fingerprint: a name for everything that the bits of a verified answer depend on, besides the request."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import torch

from backend.kernels.ops import Ops
from backend.protocol import VerifyShape

ARITHMETIC_VERSION = 1
"""Raise it with any change to a kernel, to the model or to sampling that changes bits."""


def fingerprint(
    weights_digest: str, dtype: torch.dtype, hardware: str, fixed: Ops, shape: VerifyShape, probe_digest: str
) -> str:
    """A short digest; two backends that share it give the same bits.

    The shape of a pass counts only for arithmetic that depends on it, the number of threads never. `probe_digest`, of
    the probe's logits, stands for what has no name of its own, such as the instructions a library chose for this CPU.
    """
    parts = {
        "arithmetic": ARITHMETIC_VERSION,
        "weights": weights_digest,
        "dtype": str(dtype),
        "ops": fixed.name,
        "shape": None if fixed.shape_invariant else [shape.groups, shape.window],
        "torch": torch.__version__,
        "llguidance": version("llguidance"),
        "hardware": hardware,
        "probe": probe_digest,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"vb1-{digest[:20]}"
