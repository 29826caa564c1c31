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
from backend.kernels.ops import Ops, Weight
from backend.kernels.platform import CPU, Platform


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Weight
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight


class Model:
    """One set of weights, prepared once, for a platform's lanes. `dtype` is the numerics: float32 or bfloat16."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress, platform: Platform = CPU):
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = platform.device
        weights = checkpoint.weights
        self._layers: list[_Layer] = []
        for i in range(self.config.layers):
            self._layers.append(_prepare_layer(weights, f"layers.{i}.", dtype, platform))
            progress((i + 1) / self.config.layers)
        self._embedding = weights["embedding"].to(self.device, dtype)
        self._final_norm = weights["final_norm"].to(self.device, dtype).float()
        # Logits stay float32 in both numerics: rounded to bfloat16 they tie at the top in one position out of fifty.
        self._lm_head = platform.pack(weights.get("lm_head", weights["embedding"]), None, dtype, torch.float32)
        # Computed on the host, so that the angles are the same everywhere.
        self._cos, self._sin = (table.to(self.device) for table in _rope_tables(self.config))

    def forward(
        self, ops: Ops, token_ids: torch.Tensor, layout: Layout, kv: KvPool, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids int64 [N] at layout's rows -> float32 logits [len(logit_rows), vocab] of the rows asked for.

        Writes the keys and values of all N rows to layout.slots before they are attended to.
        """
        return self.logits(ops, self.hidden(ops, token_ids, layout, kv)[logit_rows])

    @torch.inference_mode()
    def logits(self, ops: Ops, hidden: torch.Tensor) -> torch.Tensor:
        """What `hidden` gave for some rows [M, hidden_size] -> float32 logits [M, vocab]."""
        return ops.linear(ops.rms_norm(hidden, self._final_norm, self.config.rms_eps), self._lm_head)

    @torch.inference_mode()
    def hidden(self, ops: Ops, token_ids: torch.Tensor, layout: Layout, kv: KvPool) -> torch.Tensor:
        """All but the last step of `forward`: the last layer's output [N, hidden_size]."""
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
        return x


def _prepare_layer(weights: Mapping[str, torch.Tensor], prefix: str, dtype: torch.dtype, platform: Platform) -> _Layer:
    def norm(name: str) -> torch.Tensor | None:
        weight = weights.get(prefix + name)
        return None if weight is None else weight.to(platform.device, dtype).float()

    def required_norm(name: str) -> torch.Tensor:
        return weights[prefix + name].to(platform.device, dtype).float()

    def fused(*names: str) -> Weight:
        weight = torch.cat([weights[f"{prefix}{name}_proj"] for name in names])
        biases = [weights[f"{prefix}{name}_bias"] for name in names if f"{prefix}{name}_bias" in weights]
        return platform.pack(weight, torch.cat(biases) if biases else None, dtype, dtype)

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
