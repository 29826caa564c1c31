"""Tests of the Triton kernels, on a GPU where there is one, else in Triton's interpreter.

Whether kernels are interpreted is settled when they are imported, so without a GPU these tests run in processes of
their own, which tests/backend/test_triton_interpreted.py starts. To run them alone:

TRITON_INTERPRET=1 pytest tests/backend/triton_ops
"""

from __future__ import annotations

import os

import torch

_RUNS = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
collect_ignore_glob = [] if _RUNS else ["test_*.py"]
