"""`python -m benchmarks.subject_transformers DTYPE`: `generate` of transformers as a subject of benchmarks.engine.

The weights are the checkpoint's own; tests/backend/test_model_against_transformers.py shows that they are those that
transformers' loader reads from the same file.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from backend.engine.checkpoint import Checkpoint
from benchmarks.subject import Generate, serve


def build(checkpoint: Checkpoint) -> Any:
    """The checkpoint as a model of transformers, in the dtype of the command line."""
    config = checkpoint.config
    assert config.rope_scaling is None and "lm_head" not in checkpoint.weights
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    weights = {_their_name(name): weight for name, weight in checkpoint.weights.items()}
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    return model.to(getattr(torch, sys.argv[1])).eval()


def load(checkpoint: Checkpoint) -> tuple[Generate, dict[str, Any]]:
    model = build(checkpoint)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        out = model.generate(ids, attention_mask=mask, generation_config=settings)
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens

    return generate, {"attention": model.config._attn_implementation}


def _their_name(name: str) -> str:
    prefix, _, part = name.rpartition(".")
    inside = {
        "embedding": "embed_tokens",
        "final_norm": "norm",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"{letter}_proj": f"self_attn.{letter}_proj" for letter in "qkvo"},
        **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }[part]
    return ".".join(filter(None, ("model", prefix, inside, "weight")))


if __name__ == "__main__":
    serve(load)
