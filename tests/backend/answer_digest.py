"""A process of its own that prints the fingerprint and a digest of verified answers: SmolLM2's ids and logprob bits.

python -m tests.backend.answer_digest DTYPE THREADS GROUPS WINDOW DRAFTED [DEVICE]
"""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import cast

from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from backend.kernels.platform import open_platform
from backend.protocol import Sampling
from backend.settings import Device, Dtype
from tests.backend.harness import running_engine

PROMPTS = [[1, *range(start, start + length)] for start, length in ((200, 5), (4000, 63), (9000, 130))]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.95, seed=42)]


def answer(dtype: Dtype, threads: int, groups: int, window: int, drafted: int, device: Device = "cpu") -> str:
    """The fingerprint, and the SHA-256 over six completions of 40 tokens, drafted `drafted` tokens at a time."""
    whole = hashlib.sha256()
    checkpoint = open_checkpoint(SMOLLM2, lambda share: None)
    platform = open_platform(device)
    with running_engine(
        checkpoint, dtype, groups, window, kv_bytes=1 << 28, threads=threads, platform=platform
    ) as calls:
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                for token, logprob in calls.complete(prompt, 40, sampling, (drafted,)):
                    whole.update(struct.pack("<if", token, logprob))
        return f"{calls.engine.info.fingerprint} {whole.hexdigest()}"


if __name__ == "__main__":
    dtype, *numbers = sys.argv[1:6]
    device = cast(Device, sys.argv[6] if len(sys.argv) > 6 else "cpu")
    sys.stdout.write(answer(cast(Dtype, dtype), *map(int, numbers), device) + "\n")
