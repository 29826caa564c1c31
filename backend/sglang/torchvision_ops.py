"""Lets PyPI's torchvision, which is built for CUDA, be imported beside a CPU build of torch. Import this first.

SGLang imports torchvision for its image models. The wheel's compiled half does not load without CUDA, and its Python
half then fails over two operators that do not exist. Declared without kernels, they are enough for the import.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None and torch.version.hip is None:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
