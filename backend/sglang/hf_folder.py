"""Writes a checkpoint as a Hugging Face folder, for servers that read no GGUF files. Weights stay float32."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import save_file

from backend.engine.checkpoint import Checkpoint, ModelConfig
from backend.engine.open_checkpoint import open_checkpoint
from backend.protocol import TokenizerFiles

_CONFIG = "config.json"
_TOP = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
_PARTS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"{letter}_proj": f"self_attn.{letter}_proj" for letter in "qkvo"},
    **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def as_hf_folder(model: str) -> Path:
    """A folder with `model`, which is one already or whatever else open_checkpoint takes. Raises CheckpointError.

    What had to be written stays in the user's cache, under the digest of what it was read from.
    """
    if Path(model).is_dir():
        return Path(model)
    checkpoint = open_checkpoint(model, lambda share: None)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "verbatim" / checkpoint.digest / checkpoint.config.name
    if not (folder / _CONFIG).exists():
        write_hf_folder(checkpoint, folder)
    return folder


def write_hf_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config, weights and tokenizer of a Llama checkpoint. The config goes last: it marks a whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {_their_name(name): weight.contiguous() for name, weight in checkpoint.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = checkpoint.tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    _write(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, checkpoint.config))
    _write(folder / _CONFIG, _config(checkpoint))


def _config(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    assert config.rope_scaling is None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head" not in checkpoint.weights,
        "eos_token_id": checkpoint.tokenizer.eos_ids,
    }


def _tokenizer_config(tokenizer: TokenizerFiles, config: ModelConfig) -> dict[str, object]:
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        values["chat_template"] = tokenizer.chat_template
    return values


def _their_name(name: str) -> str:
    if name in _TOP:
        return f"{_TOP[name]}.weight"
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def _write(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
