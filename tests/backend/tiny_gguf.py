"""A tiny random llama model as a GGUF file, whole or spoilt as a test asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.backend.tiny_models import tiny_tokenizer

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 8, 32, 64, 2


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of Q or K as converters to GGUF store them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tiny_weights(*, tied: bool = False) -> dict[str, np.ndarray]:
    """Random weights by our names."""
    rng = np.random.default_rng(0)
    vocab = len(tiny_tokenizer().get_vocab())

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    weights = {"embedding": random(vocab, HIDDEN), "final_norm": random(HIDDEN)}
    if not tied:
        weights["lm_head"] = random(vocab, HIDDEN)
    for i in range(LAYERS):
        layer = {
            "attention_norm": random(HIDDEN),
            "q_proj": random(HEADS * HEAD_DIM, HIDDEN),
            "k_proj": random(KV_HEADS * HEAD_DIM, HIDDEN),
            "v_proj": random(KV_HEADS * HEAD_DIM, HIDDEN),
            "o_proj": random(HIDDEN, HEADS * HEAD_DIM),
            "mlp_norm": random(HIDDEN),
            "gate_proj": random(INTERMEDIATE, HIDDEN),
            "up_proj": random(INTERMEDIATE, HIDDEN),
            "down_proj": random(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"layers.{i}.{part}": weight for part, weight in layer.items()}
    return weights


_GGUF_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    *,
    tied: bool = False,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A tiny llama model; `keys` and `tensors` add or replace what is written, `...` and None leave out."""
    vocab = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "i n"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    } | dict(keys or {})
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture")))
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not ...:
            writer.add_array(key, value)
    stored: dict[str, np.ndarray | None] = {}
    for name, weight in tiny_weights(tied=tied).items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.rpartition(".")[2])
        *layer, part = name.split(".")
        prefix = f"blk.{layer[1]}." if layer else ""
        stored[f"{prefix}{_GGUF_NAMES[part]}.weight"] = permuted(weight, heads) if heads else weight
    for name, values in (stored | dict(tensors or {})).items():
        if values is None:
            continue
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
