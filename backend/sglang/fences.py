"""What the adapter does not serve, refused at start by the name of its flag rather than served wrong.

Each fence says what would break. Lifting one takes an implementation and a run of the contract tests under it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel


class FenceError(Exception):
    """SGLang was started in a way that the adapter does not serve; the message names the flag and what would break."""


def check_scheduler(scheduler: Any) -> None:
    """Refuse what a scheduler that has just started must not be. Raises FenceError."""
    runner = scheduler.tp_worker.model_runner
    parallel = get_parallel()
    for refused, reason in (
        (
            scheduler.enable_overlap,
            "--disable-overlap-schedule is missing: a pass must not run beside a batch in flight",
        ),
        (scheduler.page_size != 1, "--page-size must be 1: a window begins and ends anywhere in a page"),
        (not scheduler.spec_algorithm.is_none(), "--speculative-algorithm: it writes KV that provenance does not see"),
        (scheduler.enable_lora, "--enable-lora: adapters are not part of the fingerprint"),
        (scheduler.enable_hierarchical_cache, "--enable-hierarchical-cache: KV comes back without its provenance"),
        (scheduler.enable_pdmux, "--enable-pdmux: a pass must not run beside a batch in flight"),
        (scheduler.attn_dp_enabled, "--enable-dp-attention: a pass reaches one replica only"),
        (str(scheduler.disaggregation_mode.value) != "null", "--disaggregation-mode: KV moves without its provenance"),
        (parallel.pp_size != 1, "--pp-size must be 1: a pass runs all layers in one process"),
        (parallel.num_dp_ranks != 1, "--dp-size must be 1: run one server for each replica instead"),
        (scheduler.disable_radix_cache, "--disable-radix-cache: verified KV would be lost after each pass"),
        (type(scheduler.tree_cache) is not UnifiedRadixCache, "--radix-cache-backend: only the default tree is known"),
        (type(runner.token_to_kv_pool) is not MHATokenToKVPool, "the model's KV pool is no plain multi-head pool"),
        (runner.token_to_kv_pool.is_quantized_kv_cache, "--kv-cache-dtype: a quantised KV is not implemented"),
        (runner.token_to_kv_pool.dtype != runner.dtype, "--kv-cache-dtype must be the model's own"),
    ):
        if refused:
            raise FenceError(reason)
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            _check_attention(layer)


def _check_attention(layer: Any) -> None:
    """Our attention kernel is plain causal softmax attention."""
    for refused, reason in (
        (layer.attn_type != AttentionType.DECODER or layer.is_cross_attention, "attention that is not causal"),
        (layer.logit_cap != 0, "capped attention scores"),
        (layer.sliding_window_size > 0, "sliding-window attention"),
        (layer.qk_head_dim != layer.v_head_dim, "values of another width than keys"),
        (abs(layer.scaling - layer.qk_head_dim**-0.5) > 1e-9, "an attention scale of its own"),
    ):
        if refused:
            raise FenceError(f"the model has {reason}, which the fixed lane does not implement")
