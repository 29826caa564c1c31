"""The lanes of a CUDA (or ROCm) device.

The fixed lane is Triton's kernels throughout. The fast lane has the vendor's libraries where they are fast and choose
by shape, for matrix products and the attention of prompts, and shares the rest: fused kernels are faster than chains
of PyTorch's ops, and decoding needs an attention whose cost follows each sequence's own length.

Never run on a GPU: the lanes are tested in Triton's interpreter, on a CPU; `_capture` and `cuda_platform` not at all.
`benchmarks/gpu.sh` is what to run first on a real device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton

from backend.kernels.attention import BLOCK, Layout, gather
from backend.kernels.dense import DenseWeight, linear_dense
from backend.kernels.ops import Ops
from backend.kernels.platform import Compute, Platform
from backend.kernels.triton_ops.attention import attention
from backend.kernels.triton_ops.linear import linear
from backend.kernels.triton_ops.log_softmax import log_softmax
from backend.kernels.triton_ops.rms_norm import rms_norm
from backend.kernels.triton_ops.rope import rope
from backend.kernels.triton_ops.sample import sample
from backend.kernels.triton_ops.swiglu import swiglu

_WARM_UPS = 2


def attention_of_prompts(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """q [N, heads, D] over pools [blocks, kv_heads, BLOCK, D] -> [N, heads * D]; stock where there are many rows."""
    if layout.width == 1:
        return attention(q, keys, values, layout)
    group = q.shape[1] // keys.shape[1]
    k, v = (gather(pool, layout.tables).flatten(2, 3).repeat_interleave(group, dim=1) for pool in (keys, values))
    places = torch.arange(layout.tables.shape[1] * BLOCK, device=q.device)
    rows = layout.starts[:, None] + torch.arange(layout.width, device=q.device)
    mask = places <= rows[:, None, :, None]
    out = F.scaled_dot_product_attention(layout.pad(q).transpose(1, 2), k, v, attn_mask=mask)
    return layout.unpad(out.transpose(1, 2)).flatten(1)


CUDA_FIXED = Ops(
    name="cuda-fixed",
    shape_invariant=True,
    linear=linear,
    rms_norm=rms_norm,
    rope=rope,
    swiglu=swiglu,
    attention=attention,
    sample=sample,
    logprobs=log_softmax,
)

CUDA_FAST = Ops(
    name="cuda-fast",
    shape_invariant=False,
    linear=linear_dense,
    rms_norm=rms_norm,
    rope=rope,
    swiglu=swiglu,
    attention=attention_of_prompts,
    sample=sample,
    logprobs=log_softmax,
)


def cuda_platform() -> Platform:
    """The current CUDA device."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    toolkit = torch.version.cuda or torch.version.hip
    return Platform(
        device=device,
        fast=CUDA_FAST,
        fixed=CUDA_FIXED,
        pack=partial(DenseWeight, device=device),
        hardware=f"{properties.name} {properties.major}.{properties.minor}, {toolkit}, Triton {triton.__version__}",
        capture=partial(_capture, pool=torch.cuda.graph_pool_handle()),
    )


def _capture(compute: Compute, pool: Any) -> Compute:
    """Record a computation as a CUDA graph. All share memory: one runs at a time, and its result is used at once."""
    # Triton compiles, and libraries choose, in passes that are not recorded.
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            compute()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
