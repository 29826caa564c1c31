"""Processes that are killed and come back: gateways and backends, each kept alive by a task of its own.

Owns who is up, who died when, and what was said meanwhile. Whoever stops, asked or not, is started again on the same
port. Only what was started here is ever killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx

Kind = Literal["gateway", "backend"]

POLL_S = 0.1
BACK_AFTER_S = 0.5
"""At most so long is a process away before it is started again."""
STORE_TROUBLE = re.compile(r"does not answer \((\w+)\)")
"""What a gateway says once when its Redis took too long: from then on it generates without it."""


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended, and how: minus the signal that killed it."""

    time: float
    name: str
    kind: Kind
    status: int


@dataclass
class Member:
    """One process. `asked` says that it was told to stop, so that its end is no surprise."""

    name: str
    kind: Kind
    argv: Sequence[str]
    url: str
    up: bool = False
    asked: bool = False
    process: asyncio.subprocess.Process | None = None
    said: list[tuple[float, str]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Member {self.name} {'up' if self.up else 'down'}>"

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.up, self.asked = False, True
        if self.process.returncode is None:
            self.process.send_signal(number)


class Fleet:
    """Its members, until the context ends."""

    def __init__(self, members: Sequence[Member], chance: random.Random) -> None:
        self.members = members
        self._chance = chance
        self.deaths: list[Death] = []
        self.faults: list[str] = []
        """Who ended without having been told to."""

    async def __aenter__(self) -> Fleet:
        self._http = httpx.AsyncClient(trust_env=False, timeout=2)
        self._tasks = [asyncio.create_task(self._keep(member)) for member in self.members]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def urls(self, kind: Kind) -> list[str]:
        return [member.url for member in self.members if member.kind == kind]

    async def until_up(self, *members: Member) -> None:
        """Wait for these, or for all."""
        while not all(member.up for member in members or self.members):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(POLL_S)

    @property
    def troubled(self) -> list[tuple[float, str]]:
        """When gateways said that their Redis took too long, and what went wrong with it."""
        said = (line for member in self.members for line in member.said)
        return [(at, found[1]) for at, line in said if (found := STORE_TROUBLE.search(line))]

    async def torment(self, every_s: float) -> None:
        """Kill somebody now and then, never the last of a kind that is up."""
        while True:
            await asyncio.sleep(every_s * self._chance.uniform(0.5, 1.5))
            kinds = [member.kind for member in self.members if member.up]
            if victims := [member for member in self.members if member.up and kinds.count(member.kind) > 1]:
                self._chance.choice(victims).signal(signal.SIGKILL)

    async def roll(self) -> int:
        """Restart one after the other, in order, for ever, with the signal that lets them finish their work."""
        while True:
            for member in self.members:
                await self.until_up()
                member.signal(signal.SIGTERM)
                await self.until_up(member)

    async def _keep(self, member: Member) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                *member.argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=_environment()
            )
            member.process, member.asked = process, False
            listening = asyncio.create_task(_listen(member, process))
            try:
                await self._until_ready(member, process)
                status = await process.wait()
                await listening
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            member.up = False
            self.deaths.append(Death(time.time(), member.name, member.kind, status))
            if not member.asked or (member.kind == "gateway" and status not in (0, -signal.SIGKILL)):
                last = " | ".join(line for _, line in member.said[-5:])
                self.faults.append(f"{member.name} ended with status {status}: {last}")
            await asyncio.sleep(self._chance.uniform(0, BACK_AFTER_S))

    async def _until_ready(self, member: Member, process: asyncio.subprocess.Process) -> None:
        while process.returncode is None and not member.asked:
            with contextlib.suppress(httpx.TransportError):
                if (await self._http.get(f"{member.url}/healthz")).status_code == 200:
                    member.up = not member.asked
                    return
            await asyncio.sleep(POLL_S)


async def _listen(member: Member, process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        member.said.append((time.time(), line.decode(errors="replace").rstrip()))


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
