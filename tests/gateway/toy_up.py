"""`verbatim up` over the toy engine, as a process: `toy_up.py GATEWAY_PORT ENGINE_PORT [--fail] [--policy FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from gateway.cli.up import run_up
from gateway.settings import Settings

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port")
    parser.add_argument("engine_port")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--policy")
    options = parser.parse_args()
    settings = Settings(f"http://127.0.0.1:{options.engine_port}", port=int(options.port), drain_timeout_s=5.0)
    engine_argv = ["--fail"] if options.fail else []
    gateway_argv = ["--port", options.port, "--drain-timeout-s", "5"]
    if options.policy is not None:
        gateway_argv += ["--policy", options.policy]
    command = (sys.executable, str(Path(__file__).with_name("toy_engine.py")))
    sys.exit(asyncio.run(run_up(settings, engine_argv, gateway_argv, command)))
