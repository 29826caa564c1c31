"""The SGLang platform "verbatim_cpu": a CPU without AMX kernels, for development and tests.

SGLang's own CPU platform needs `sgl-kernel-cpu`. This one says that nothing but plain PyTorch is there, and SGLang
falls back to its native implementations. Selected with `SGLANG_PLATFORM=verbatim_cpu`; the launcher does that where
SGLang is told `--device cpu`.
"""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

NAME = "verbatim_cpu"


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: the class that SGLang is to load."""
    return f"{__name__}.PlainCpuPlatform"


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """PyTorch on a CPU and nothing else: no Triton, no graphs, no kernels of SGLang's own."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
