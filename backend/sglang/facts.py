"""What a scheduler tells the HTTP side about itself at start."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from backend.kernels.platform import Platform
from backend.sglang.passes import ServerFacts
from backend.sglang.settings import AdapterSettings
from backend.sglang.version_gate import check_version


def server_facts(scheduler: Any, platform: Platform, settings: AdapterSettings) -> ServerFacts:
    """The facts of a scheduler that has just started."""
    runner = scheduler.tp_worker.model_runner
    return ServerFacts(
        version=check_version(),
        device=platform.device.type,
        hardware=platform.hardware,
        fixed_ops=platform.fixed.name,
        dtype=str(runner.dtype).removeprefix("torch."),
        # SGLang keeps a few positions for itself; within this bound it never cuts a sequence.
        max_context=scheduler.max_req_input_len,
        pool_tokens=scheduler.max_total_num_tokens,
        vocab_size=runner.model_config.vocab_size,
        groups=settings.shape.groups,
        window=settings.shape.window,
        tensor_parallel=get_parallel().tp_size,
        libraries={"torch": str(torch.__version__), "triton": version("triton")},
    )
