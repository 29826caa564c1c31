"""Child processes that never outlive us.

Each child runs in its own session, so that Ctrl-C in a terminal reaches only us and we decide the order in which they
stop. On Linux the kernel kills them should we be killed ourselves; elsewhere a killed parent leaves them to be stopped
by hand.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType

PR_SET_PDEATHSIG = 1


class Child:
    """One child process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        self.name = name
        self._process = process
        self._grace_s = grace_s

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self._process.pid} returncode={self._process.returncode}>"

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to stop; kill it when it has not within its grace."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(self._grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


class Children:
    """Starts children; leaving the context stops them, the last one started first."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for child in reversed(self._children):
                await child.stop()
        finally:
            self.kill()

    async def start(self, name: str, argv: list[str], *, grace_s: float, quiet: bool = False) -> Child:
        """Start a process; `quiet` drops its standard output. Its standard error is ours."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL if quiet else None,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        child = Child(name, process, grace_s)
        self._children.append(child)
        return child

    def kill(self) -> None:
        """End all of them at once."""
        for child in self._children:
            child.kill()


def _die_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # looked up before the fork: little is safe after it
    parent = os.getpid()

    def arrange() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)

    return arrange
