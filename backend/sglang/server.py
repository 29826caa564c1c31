"""The server's process: stock SGLang, told to serve the window protocol as well. Started by serve.py.

SGLang spawns processes of its own, and Python repeats the imports of the main module in them. So what stands at the top
here takes place there too, which the first import relies on; and it is kept to what they need anyway.
"""

from __future__ import annotations

import backend.sglang.torchvision_ops  # noqa: F401

# isort: split
import os
import sys

from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree


def main() -> None:
    """Run SGLang on the process's arguments until it ends."""
    from backend.sglang.http_side import START, start_with_protocol  # noqa: PLC0415  # spawned processes need it not

    HookRegistry.register(START, start_with_protocol, HookType.AROUND)
    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
