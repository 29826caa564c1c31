"""`verbatim up` over the toy engine, as a process: `python toy_up.py GATEWAY_PORT ENGINE_PORT [--fail]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gateway.cli.up import run_up
from gateway.settings import Settings

if __name__ == "__main__":
    port, engine_port, *engine_argv = sys.argv[1:]
    settings = Settings(f"http://127.0.0.1:{engine_port}", port=int(port), drain_timeout_s=5.0)
    command = (sys.executable, str(Path(__file__).with_name("toy_engine.py")))
    sys.exit(asyncio.run(run_up(settings, engine_argv, ["--port", port, "--drain-timeout-s", "5"], command)))
