"""`python -m benchmarks.subject_hooked DTYPE KV_BYTES`: SGLang with the hooks of the adapter, serving other traffic."""

from __future__ import annotations

import os

from backend.protocol import VerifyShape
from backend.sglang.settings import AdapterSettings
from benchmarks.subject import serve
from benchmarks.subject_sglang import load

if __name__ == "__main__":
    os.environ.update(AdapterSettings(VerifyShape(groups=8, window=32)).to_environment())
    serve(load)
