"""A running `verbatim up`, an engine and a gateway in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def up_process(*flags: str) -> Iterator[str]:
    """Its base URL, without the `/v1`, once it serves."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "gateway.cli", "up", "--port", str(port), *flags]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as up:
        assert up.stdout is not None
        said = ""
        for line in up.stdout:
            said += line
            if "Stop with Ctrl-C." in line:
                break
        else:
            raise AssertionError(said)
        yield f"http://127.0.0.1:{port}"
        up.terminate()
