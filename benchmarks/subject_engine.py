"""`python -m benchmarks.subject_engine DTYPE KV_BYTES`: this engine as a subject of benchmarks.engine."""

from __future__ import annotations

import sys
from queue import SimpleQueue
from typing import Any, cast

from backend.engine.checkpoint import Checkpoint
from backend.engine.engine import Engine
from backend.engine.open_checkpoint import SMOLLM2
from backend.engine.tasks import DecodeTask
from backend.protocol import Sampling
from backend.settings import Dtype, EngineSettings
from benchmarks.subject import Generate, serve
from benchmarks.waiting import Ending


def load(checkpoint: Checkpoint) -> tuple[Generate, dict[str, Any]]:
    settings = EngineSettings(
        model=SMOLLM2,
        dtype=cast(Dtype, sys.argv[1]),
        threads=1,
        kv_bytes=int(sys.argv[2]),
        verify_groups=8,
        verify_window=32,
    )
    engine = Engine(checkpoint, settings, lambda share: None)
    engine.start()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        ends: SimpleQueue[Exception | None] = SimpleQueue()
        tasks = [
            DecodeTask(prompt, count, Sampling(temperature=0.0), frozenset(), top=0, is_draft=True)
            for prompt in prompts
        ]
        for task in tasks:
            engine.submit(task, Ending(ends.put))
        for _ in tasks:
            error = ends.get()
            if error is not None:
                raise error
        return [[token.id for token in task.produced] for task in tasks]

    return generate, {"fingerprint": engine.info.fingerprint, "kv_bytes": settings.kv_bytes}


if __name__ == "__main__":
    serve(load)
