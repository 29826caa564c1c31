"""A running `verbatim up`, an engine and a gateway in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def up_process(*flags: str) -> Iterator[str]:
    """Its base URL, without the `/v1`, once it serves."""
    command = [sys.executable, "-m", "gateway.cli", "up", "--port", "0", *flags]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as up:
        assert up.stdout is not None
        said = ""
        for line in up.stdout:
            said += line
            if "Stop with Ctrl-C." in line:
                break
        else:
            raise AssertionError(said)
        (url,) = re.findall(r"Verbatim is ready: (\S+)/v1", said)
        yield url
        up.terminate()
