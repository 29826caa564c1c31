"""`python -m benchmarks.subject_sglang DTYPE KV_BYTES`: stock SGLang as a subject of benchmarks.engine.

SGLang's own engine, without HTTP and without Verbatim's hooks; just the platform that lets it run on a plain CPU. Its
scheduler and detokenizer are processes of their own, which count. benchmarks.subject_hooked is the same with the hooks.
"""

from __future__ import annotations

import backend.sglang.torchvision_ops  # noqa: F401

# isort: split
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from backend.engine.checkpoint import Checkpoint
from backend.sglang.hf_folder import write_hf_folder
from backend.sglang.serve import environment
from backend.sglang.settings import VARIABLE
from benchmarks.subject import Generate, serve


def load(checkpoint: Checkpoint) -> tuple[Generate, dict[str, Any]]:
    os.environ.update(environment(["--device", "cpu"], os.environ))
    from sglang import Engine  # noqa: PLC0415  # reads its environment while it is imported

    config = checkpoint.config
    tokens = int(sys.argv[2]) // (config.layers * 2 * config.kv_heads * config.head_dim * 4)
    folder = Path(tempfile.mkdtemp())
    write_hf_folder(checkpoint, folder)
    engine = Engine(
        model_path=str(folder),
        device="cpu",
        dtype=sys.argv[1],
        sampling_backend="pytorch",
        sleep_on_idle=True,
        max_total_tokens=tokens,
        disable_overlap_schedule=VARIABLE in os.environ,
        log_level="error",
    )

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        return [answer["output_ids"] for answer in answers]

    return generate, {"max_total_tokens": tokens}


if __name__ == "__main__":
    serve(load)
