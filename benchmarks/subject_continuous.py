"""`python -m benchmarks.subject_continuous DTYPE`: `generate_batch` of transformers as a subject of benchmarks.engine.

Left to itself it sizes its cache and batches by the memory there is, which takes it a minute for each run on a CPU; the
sizes here hold all that benchmarks.engine asks for.
"""

from __future__ import annotations

from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from backend.engine.checkpoint import Checkpoint
from benchmarks.subject import Generate, serve
from benchmarks.subject_transformers import build


def load(checkpoint: Checkpoint) -> tuple[Generate, dict[str, Any]]:
    model = build(checkpoint)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=512, max_batch_tokens=512, use_async_batching=False, use_cuda_graph=False
    )

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        settings: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    return generate, {"page_tokens": batching.page_size, "pages": batching.num_blocks}


if __name__ == "__main__":
    serve(load)
