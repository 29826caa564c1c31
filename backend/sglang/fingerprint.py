"""The fingerprint of an SGLang backend: a name for everything that the bits of a verified answer depend on."""

from __future__ import annotations

import hashlib
import json

import msgspec

from backend.engine.fingerprint import ARITHMETIC_VERSION
from backend.sglang.passes import ServerFacts

ADAPTER_VERSION = 1
"""Raise it with any change to the adapter that changes bits."""
_NOT_IN_BITS = ("max_context", "pool_tokens", "vocab_size")
"""Facts that say how far a sequence may go, not what its tokens are; the vocabulary is the weights'."""


def fingerprint(weights_digest: str, facts: ServerFacts, probe_digest: str) -> str:
    """A short digest; two backends that share it give the same bits.

    The engine's kernels choose tokens and attend here too, so their version counts. `probe_digest` stands for what has
    no name of its own, such as the instructions that a library chose for this machine.
    """
    known = {key: value for key, value in msgspec.to_builtins(facts).items() if key not in _NOT_IN_BITS}
    parts = {
        "arithmetic": ARITHMETIC_VERSION,
        "adapter": ADAPTER_VERSION,
        "weights": weights_digest,
        "server": known,
        "probe": probe_digest,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"vb1-{digest[:20]}"
