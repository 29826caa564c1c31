"""Tests in Triton's interpreter, which needs no GPU. Whether kernels are interpreted is settled when they are imported,

so these tests run in a process of their own: tests/backend/test_triton_interpreted.py starts it. Alone:

TRITON_INTERPRET=1 pytest tests/backend/interpreted
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
