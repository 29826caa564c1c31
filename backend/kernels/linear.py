"""Linear layers: y = x W^T + b over weights packed once into oneDNN's blocked layout.

Why the fixed lane's result for a row depends on that row alone. oneDNN's inner-product kernel computes each output
element as one chain of fused multiply-adds over K, in blocks whose size depends on N, K and the instruction set, not
on the number of rows M or the threads, which split M and N only. The exception seen on AVX-512 is M = 1, which is a
matrix-vector kernel of its own with another order over K: the fixed lane therefore never asks for fewer than
`MIN_ROWS` rows. MKL's GEMM, which `F.linear` calls for float32, has three classes by M and is not used.

In doubt: none of this is promised by oneDNN. tests/backend/test_kernels.py and the start-up probe check it.

bfloat16 numerics: inputs and outputs are bfloat16 values, products are accumulated in float32 and rounded once. Where
the CPU multiplies bfloat16 natively that is one kernel; elsewhere the operands are widened to float32 first, because
emulated bfloat16 GEMM is several times slower than float32 GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS = 4


class PackedWeight:
    """A weight [out_features, in_features] and optional bias, packed for one numerics.

    `out_dtype` is what a product is rounded to: the numerics' dtype, or float32 for logits.
    """

    __slots__ = ("_bias", "_packed", "compute_dtype", "out_dtype", "shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype):
        native = dtype is torch.float32 or (out_dtype is dtype and multiplies_bfloat16())
        self.shape = weight.shape
        self.out_dtype = out_dtype
        self.compute_dtype = dtype if native else torch.float32
        # Rounded to the numerics' dtype first: both ways of multiplying start from the same values.
        rounded = weight.to(dtype).to(self.compute_dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(rounded.contiguous(), None)
        self._bias = None if bias is None else bias.to(dtype).to(self.compute_dtype)

    def __repr__(self) -> str:
        return f"<PackedWeight {tuple(self.shape)} {self.compute_dtype} -> {self.out_dtype}>"

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in_features] -> [M, out_features] in `out_dtype`."""
        wide = x.to(self.compute_dtype)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
        return y.to(self.out_dtype)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot-product instructions, and oneDNN may use them."""
    return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear_fast(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x [M, K] -> [M, N]; the bits of a row may depend on M."""
    return weight.product(x)


def linear_fixed(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x [M, K] -> [M, N]; the bits of a row depend on that row alone."""
    rows = x.shape[0]
    if rows >= MIN_ROWS:
        return weight.product(x)
    return weight.product(F.pad(x, (0, 0, 0, MIN_ROWS - rows)))[:rows]
