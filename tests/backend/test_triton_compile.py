"""Every kernel of the fixed lane, compiled ahead of time for three GPUs, as two real models would launch it.

No GPU is needed: the launchers run over tensors without memory, what they would launch is recorded, and Triton compiles
that for each target. This catches what a machine without a GPU can catch: code that does not compile, registers that
spill, and code that depends on what changes from pass to pass.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from backend.kernels.attention import BLOCK, Layout  # noqa: E402
from backend.kernels.dense import DenseWeight  # noqa: E402
from backend.kernels.triton_ops.attention import attention  # noqa: E402
from backend.kernels.triton_ops.linear import linear  # noqa: E402
from backend.kernels.triton_ops.log_softmax import log_softmax  # noqa: E402
from backend.kernels.triton_ops.rms_norm import rms_norm  # noqa: E402
from backend.kernels.triton_ops.rope import rope  # noqa: E402
from backend.kernels.triton_ops.sample import sample  # noqa: E402
from backend.kernels.triton_ops.swiglu import swiglu  # noqa: E402

SPILLS_ALLOWED = 0
"""Registers spilled to memory, or bytes of it, that a kernel may have."""

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
"""Shared memory that one program may have on each."""
META = torch.device("meta")
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


LLAMA_8B = Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
SMOLLM2 = Shape(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152)
MODELS = {
    "llama-8b-bfloat16": (LLAMA_8B, torch.bfloat16),
    "smollm2-bfloat16": (SMOLLM2, torch.bfloat16),
    "smollm2-float32": (SMOLLM2, torch.float32),
}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _linear(rows: int, inputs: int, outputs: int, dtype: torch.dtype, out: torch.dtype, bias: bool) -> None:
    weight = DenseWeight(
        _empty(outputs, inputs, dtype=dtype), _empty(outputs, dtype=dtype) if bias else None, dtype, out, META
    )
    linear(_empty(rows, inputs, dtype=dtype), weight)


def _attention(shape: Shape, dtype: torch.dtype, sequences: int, width: int, blocks: int) -> None:
    rows = sequences * width
    pool = _empty(2 * blocks, shape.kv_heads, BLOCK, shape.head_dim, dtype=dtype)
    layout = Layout(
        positions=_empty(rows, dtype=torch.int64),
        slots=_empty(rows, dtype=torch.int64),
        tables=_empty(sequences, blocks, dtype=torch.int64),
        starts=_empty(sequences, dtype=torch.int64),
        width=width,
    )
    attention(_empty(rows, shape.heads, shape.head_dim, dtype=dtype), pool, pool, layout)


def _rope(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    # Queries and keys are views into the fused projection.
    fused = _empty(rows, heads + 2, head_dim, dtype=dtype)
    angles = _empty(rows, 1, head_dim, dtype=torch.float32)
    rope(fused[:, :heads], angles, angles)


LAUNCHES: dict[str, Callable[[Shape, torch.dtype, int], object]] = {
    "qkv": lambda s, dtype, rows: _linear(
        rows, s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim, dtype, dtype, bias=True
    ),
    "down": lambda s, dtype, rows: _linear(rows, s.intermediate, s.hidden, dtype, dtype, bias=False),
    "lm_head": lambda s, dtype, rows: _linear(rows, s.hidden, s.vocab, dtype, torch.float32, bias=False),
    "attention": lambda s, dtype, rows: _attention(s, dtype, sequences=rows, width=rows, blocks=2 * rows),
    "rms_norm": lambda s, dtype, rows: rms_norm(
        _empty(rows, s.hidden, dtype=dtype), _empty(s.hidden, dtype=torch.float32), 1e-5
    ),
    "rope": lambda s, dtype, rows: _rope(rows, s.heads, s.head_dim, dtype),
    "swiglu": lambda s, dtype, rows: swiglu(_empty(rows, 2 * s.intermediate, dtype=dtype)),
    "log_softmax": lambda s, dtype, rows: log_softmax(_empty(rows, s.vocab, dtype=torch.float32)),
    "sample": lambda s, dtype, rows: sample(_empty(rows, s.vocab, dtype=torch.float32), [(42, 0)] * rows),
}
# Logits are float32 whatever the numerics.
CASES = [
    (op, model)
    for op in LAUNCHES
    for model in MODELS
    if op not in ("log_softmax", "sample") or model.endswith("bfloat16")
]


@dataclass(frozen=True, slots=True)
class Compilation:
    """All that decides which binary a launch runs."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, object]


def _record(monkeypatch: pytest.MonkeyPatch, launch: Callable[[], object]) -> Compilation:
    """What a launcher would have compiled, by Triton's rules of specialisation."""
    recorded: list[Compilation] = []

    def run(kernel: Any, *args: object, grid: tuple[int, ...], warmup: bool, **given: object) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | given
        signature, constants, attributes = {}, {}, {}
        for param in kernel.params:
            value = values.pop(param.name)
            if param.is_constexpr:
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = _TYPES[value.dtype]
                attributes[(param.num,)] = [["tt.divisibility", 16]]
            else:
                assert isinstance(value, int) and param.do_not_specialize, f"{param.name} changes with the pass"
                signature[param.name] = "i32"
        recorded.append(Compilation(kernel, signature, constants, attributes, values))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        launch()
    (compilation,) = recorded
    return compilation


@pytest.mark.parametrize(("op", "model"), CASES)
def test_passes_of_all_shapes_run_one_binary(monkeypatch: pytest.MonkeyPatch, op: str, model: str) -> None:
    shape, dtype = MODELS[model]
    few, *others = (_record(monkeypatch, lambda rows=rows: LAUNCHES[op](shape, dtype, rows)) for rows in (1, 3, 64))
    assert all(other == few for other in others)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("op", "model"), CASES)
def test_a_kernel_compiles_without_spills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str, model: str, target: str
) -> None:
    shape, dtype = MODELS[model]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found = _record(monkeypatch, lambda: LAUNCHES[op](shape, dtype, 64))
    source = ASTSource(found.kernel, found.signature, found.constants, found.attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=found.options)
    if target == "gfx942":
        text = compiled.asm["amdgcn"]
        spilled = [int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text)]
        assert spilled, "the compiler no longer says how many registers it spilled"
        products, atomics = r"v_mfma_f32", r"(global|flat|buffer)_atomic"
    else:
        text = compiled.asm["ptx"]
        spilled = _stack_bytes(compiled.asm["cubin"], tmp_path / "kernel.cubin")
        products, atomics = r"(wgmma\.mma_async|mma\.sync)", r"\b(atom|red)\."
        assert "tf32" not in text
    assert max(spilled) <= SPILLS_ALLOWED
    assert compiled.metadata.shared <= SHARED_BYTES[target]
    assert not re.search(atomics, text), "results are added up by one program alone"
    if op in ("qkv", "down", "lm_head", "attention") and dtype is not torch.float32:
        assert re.search(products, text), "products should run on the matrix units"


def _stack_bytes(cubin: bytes, path: Path) -> list[int]:
    """Bytes of stack and of local memory of a kernel, where spilled registers go."""
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [int(count) for count in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)]
