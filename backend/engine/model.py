"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM) as one forward pass over a paged KV cache.

Owns the prepared weights and the order of operations. The arithmetic comes from the lane's `Ops`; which rows run, and
where their keys and values go, comes from the `Layout`. Knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from backend.engine.checkpoint import Checkpoint, ModelConfig, Progress
from backend.engine.kv_pool import KvPool
from backend.kernels.attention import Layout
from backend.kernels.linear import PackedWeight
from backend.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: PackedWeight
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedWeight
    mlp_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight


class Model:
    """One set of weights, prepared once, for any number of lanes. `dtype` is the numerics: float32 or bfloat16."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress):
        self.config = checkpoint.config
        self.dtype = dtype
        weights = checkpoint.weights
        self._layers: list[_Layer] = []
        for i in range(self.config.layers):
            self._layers.append(_prepare_layer(weights, f"layers.{i}.", dtype))
            progress((i + 1) / self.config.layers)
        self._embedding = weights["embedding"].to(dtype)
        self._final_norm = weights["final_norm"].to(dtype).float()
        # Logits stay float32 in both numerics: rounded to bfloat16 they tie at the top in one position out of fifty.
        self._lm_head = PackedWeight(weights.get("lm_head", weights["embedding"]), None, dtype, torch.float32)
        self._cos, self._sin = _rope_tables(self.config)

    @torch.inference_mode()
    def forward(
        self, ops: Ops, token_ids: torch.Tensor, layout: Layout, kv: KvPool, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids int64 [N] at layout's rows -> float32 logits [len(logit_rows), vocab] of the rows asked for.

        Writes the keys and values of all N rows to layout.slots before they are attended to.
        """
        config = self.config
        cos, sin = self._cos[layout.positions][:, None], self._sin[layout.positions][:, None]
        slots = kv.rows(layout.slots)
        x = self._embedding[token_ids]
        for index, layer in enumerate(self._layers):
            hidden = ops.rms_norm(x, layer.attention_norm, config.rms_eps)
            qkv = ops.linear(hidden, layer.qkv).view(len(x), -1, config.head_dim)
            q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = ops.rms_norm(q, layer.q_norm, config.rms_eps)
                k = ops.rms_norm(k, layer.k_norm, config.rms_eps)
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
            kv.write(index, slots, k, v)
            attended = ops.attention(q, kv.keys[index], kv.values[index], layout)
            x = x + ops.linear(attended, layer.o)
            hidden = ops.rms_norm(x, layer.mlp_norm, config.rms_eps)
            x = x + ops.linear(ops.swiglu(ops.linear(hidden, layer.gate_up)), layer.down)
        last = ops.rms_norm(x[logit_rows], self._final_norm, config.rms_eps)
        return ops.linear(last, self._lm_head)


def _prepare_layer(weights: Mapping[str, torch.Tensor], prefix: str, dtype: torch.dtype) -> _Layer:
    def norm(name: str) -> torch.Tensor | None:
        weight = weights.get(prefix + name)
        return None if weight is None else weight.to(dtype).float()

    def required_norm(name: str) -> torch.Tensor:
        return weights[prefix + name].to(dtype).float()

    def fused(*names: str) -> PackedWeight:
        weight = torch.cat([weights[f"{prefix}{name}_proj"] for name in names])
        biases = [weights[f"{prefix}{name}_bias"] for name in names if f"{prefix}{name}_bias" in weights]
        return PackedWeight(weight, torch.cat(biases) if biases else None, dtype, dtype)

    return _Layer(
        attention_norm=required_norm("attention_norm"),
        qkv=fused("q", "k", "v"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        o=fused("o"),
        mlp_norm=required_norm("mlp_norm"),
        gate_up=fused("gate", "up"),
        down=fused("down"),
    )


def _rope_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_position, head_dim], of every position's angles."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is not None:
        # Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
        wavelengths = 2 * math.pi / frequencies
        smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    angles = torch.arange(config.max_position, dtype=torch.float32)[:, None] * frequencies
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()
