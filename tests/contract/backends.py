"""Backends as processes: how each kind is started, and how to tell that it is ready. Tests speak HTTP to them alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from backend.protocol import Info

GROUPS, WINDOW = 4, 16
POOL_TOKENS = 8192
START_TIMEOUT_S = 240.0
REPOSITORY = Path(__file__).parents[2]
SGLANG_PYTHON = Path(os.environ.get("VERBATIM_SGLANG_PYTHON", REPOSITORY / ".venv-sglang/bin/python"))
"""The interpreter of an environment that holds SGLang (scripts/install-sglang-cpu.sh makes one)."""


def engine_command(model: Path, kv_bytes_per_token: int) -> list[str]:
    flags = ["--dtype", "float32", "--kv-bytes", str(POOL_TOKENS * kv_bytes_per_token)]
    return [sys.executable, "-m", "backend.server", "--model", str(model), *flags]


def sglang_command(model: Path, tensor_parallel: int) -> list[str]:
    flags = ["--device", "cpu", "--max-total-tokens", str(POOL_TOKENS), "--log-level", "warning"]
    flags += ["--tp", str(tensor_parallel)]
    return [str(SGLANG_PYTHON), "-m", "backend.sglang.serve", "--model-path", str(model), *flags]


@dataclass
class Backend:
    """One backend, started with `command` plus address and shape; `log` is where its output goes."""

    command: list[str]
    log: Path
    port: int = field(init=False)
    info: Info = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        shape = ["--verify-groups", str(GROUPS), "--verify-window", str(WINDOW)]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, *address, *shape],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_ready()
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            self.info = msgspec.json.decode(client.get("/v1/info").content, type=Info)

    def stop(self) -> None:
        """SIGTERM, then whatever is left of its process group."""
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        """As a crash would."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            while True:
                assert self._process.poll() is None, self._tail("the backend ended")
                assert time.monotonic() < deadline, self._tail("the backend did not become ready")
                try:
                    if client.get("/healthz").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)

    def _tail(self, message: str) -> str:
        return f"{message}:\n{self.log.read_text(errors='replace')[-4000:]}"
