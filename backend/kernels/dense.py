"""Linear layers over plain weights, as CUDA devices have them; backend/kernels/linear.py has the packed ones of a CPU.

The fixed lane's product over these weights is backend/kernels/triton_ops/linear.py. The product here is the fast
lane's: its library chooses another kernel, with other sums, for other numbers of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class DenseWeight:
    """A weight [out_features, in_features] and optional bias in one numerics, on one device.

    `out_dtype` is what a product is rounded to: the numerics' dtype, or float32 for logits.
    """

    __slots__ = ("bias", "matrix", "out_dtype")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        device: torch.device,
    ):
        # A copy of its own: a tensor of a mapped file may start at any address.
        self.matrix = torch.empty(weight.shape, dtype=dtype, device=device).copy_(weight)
        self.bias = None if bias is None else bias.to(device, dtype)
        self.out_dtype = out_dtype

    def __repr__(self) -> str:
        return f"<DenseWeight {tuple(self.matrix.shape)} {self.matrix.dtype} -> {self.out_dtype} {self.matrix.device}>"


def linear_dense(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    """x [M, K] -> [M, N] in the weight's `out_dtype`; the bits of a row may depend on M."""
    if x.is_cuda and weight.out_dtype is not x.dtype:
        # Logits: not rounded to the numerics' dtype on the way, where many would tie. CPUs lack this product.
        assert weight.bias is None
        return torch.mm(x, weight.matrix.T, out_dtype=weight.out_dtype)
    return F.linear(x, weight.matrix, weight.bias).to(weight.out_dtype)
