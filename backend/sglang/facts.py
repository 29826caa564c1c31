"""What a scheduler tells the HTTP side about itself at start."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from backend.sglang.passes import ServerFacts
from backend.sglang.settings import AdapterSettings
from backend.sglang.version_gate import check_version


def server_facts(scheduler: Any, settings: AdapterSettings) -> ServerFacts:
    """The facts of a scheduler that has just started."""
    runner = scheduler.tp_worker.model_runner
    device = torch.device(runner.device)
    return ServerFacts(
        version=check_version(),
        device=device.type,
        device_name=_device_name(device),
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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
