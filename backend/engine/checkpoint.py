"""What a loaded model is, whatever file it came from: its shape, its weights, its tokenizer and its digest.

Owns the names of the weights. Knows neither file formats (gguf_checkpoint, hf_checkpoint) nor how weights are used.

Weight names, each a float32 tensor as stored, [out_features, in_features] for projections:

    embedding                                      [vocab, hidden]
    final_norm                                     [hidden]
    lm_head                                        [vocab, hidden], absent where the embedding is tied
    layers.{i}.attention_norm, .mlp_norm           [hidden]
    layers.{i}.q_proj, .k_proj, .v_proj            [heads * head_dim | kv_heads * head_dim, hidden], rotate-half layout
    layers.{i}.q_bias, .k_bias, .v_bias            [out_features], where the family has them (Qwen2)
    layers.{i}.q_norm, .k_norm                     [head_dim], where the family has them (Qwen3)
    layers.{i}.o_proj                              [hidden, heads * head_dim]
    layers.{i}.gate_proj, .up_proj                 [intermediate, hidden]
    layers.{i}.down_proj                           [hidden, intermediate]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from backend.protocol import TokenizerFiles

Progress: TypeAlias = Callable[[float], None]
"""Called with the share of the loading that is done, 0 to 1."""


class CheckpointError(Exception):
    """A model cannot be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's rotary frequency scaling (`rope_type: llama3` in a Hugging Face config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family model."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model read into memory. `digest` is the SHA-256 of the bytes of its weight, config and tokenizer files."""

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    tokenizer: TokenizerFiles
    digest: str
