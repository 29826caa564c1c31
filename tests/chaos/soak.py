"""Gateways and backends that are killed at random, and restarted in turn, under clients that compare every answer.

    python -m tests.chaos.soak --seconds 60                      # 4 gateways, 2 toy backends, 64 clients, SIGKILL
    python -m tests.chaos.soak --backend engine --gateways 2 --clients 12 --seconds 600 --roll --kill-every-s 8

First it is calm for a fifth of the time: then every position of every log must be computed once. Then the storm. The
exit status is 1 where an answer was wrong or lost, where work was done twice without need, or where a process ended
that nobody had told to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.clients import Clients, Truth
from tests.chaos.fleet import Fleet, Kind, Member
from tests.chaos.work import Work, work

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gateway"))

from shaken_redis import ShakenRedis  # noqa: E402

POLICY = """\
version: 1
anonymous: everybody
tenants: {everybody: {determinism: {mode: verified}}}
defaults: {cache: {scope: tenant}}
"""
KEYS = {"llama.context_length": 512, "tokenizer.chat_template": "{{ messages[0].content }}"}
"""Of the tiny random model that the engine runs."""
CALM = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `backend` is toy, whose work is counted, or engine, the embedded one with a tiny random model."""

    backend: str = "toy"
    gateways: int = 4
    backends: int = 2
    clients: int = 64
    seconds: float = 60.0
    kill_every_s: float = 2.0
    roll: bool = False
    shake_redis: bool = False
    redis_timeout_s: float = 2.0
    """Longer than the default: on a machine that is too busy for it logs would be generated more than once."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it; `faults` says in words what is wrong."""

    seconds: float
    answers: int
    attempts: int
    failed_attempts: dict[str, int]
    failed_attempts_share: float
    given_up_by_default_clients: int
    given_up_share: float
    lost: int
    wrong: int
    slowest_s: float
    log: dict[str, int]
    deaths: dict[str, int]
    redis_shaken: dict[str, int]
    redis_trouble: dict[str, int]
    work: Work | None
    faults: list[str]


async def soak(plan: Plan, directory: Path) -> Report:
    """Run a plan; its files go to the directory."""
    chance = random.Random(plan.seed)
    record = directory / "record"
    with files(directory, plan) as site, ShakenRedis(directory, chance) as redis:
        members = site.backends(plan.backends, record)
        models = site.models(members)
        members += [site.gateway(f"gateway {n}", models, redis.url) for n in range(plan.gateways)]
        alone = site.backends(1, None)
        alone += [site.gateway("reference", site.models(alone), None)]
        async with Fleet(alone, chance) as reference, Fleet(members, chance) as fleet:
            await asyncio.gather(fleet.until_up(), reference.until_up())
            truth = Truth(reference.urls("gateway")[0])
            clients = Clients(fleet.urls("gateway"), truth, chance)
            began = time.monotonic()
            asking = asyncio.create_task(clients.run(plan.clients))
            await asyncio.sleep(CALM * plan.seconds)
            storm = [asyncio.create_task(fleet.torment(plan.kill_every_s))]
            if plan.shake_redis:
                storm.append(asyncio.create_task(redis.torment(plan.kill_every_s)))
            if plan.roll:
                storm.append(asyncio.create_task(fleet.roll()))
            await asyncio.wait([asking, *storm], timeout=(1 - CALM) * plan.seconds, return_when="FIRST_COMPLETED")
            clients.stop()
            for task in storm:
                task.cancel()
            await asking
            await asyncio.gather(*storm, return_exceptions=True)
            seconds = time.monotonic() - began
            await truth.aclose()
            reasons = [*(death.time for death in fleet.deaths), *(at for at, _ in fleet.troubled)]
            # A Redis that came back empty has its logs generated again, whenever they are asked for.
            counted = work(record, reasons) if record.exists() and not plan.shake_redis else None
            return _report(seconds, clients, fleet, redis, counted)


def _report(seconds: float, clients: Clients, fleet: Fleet, redis: ShakenRedis, counted: Work | None) -> Report:
    tally = clients.tally
    needless = [] if counted is None else [f"computed again: {one}" for one in counted.needless]
    failed = sum(tally.let_down.values())
    requests = tally.answers + tally.lost
    return Report(
        seconds=round(seconds, 1),
        answers=tally.answers,
        attempts=tally.attempts,
        failed_attempts=dict(tally.let_down),
        failed_attempts_share=round(failed / max(1, tally.attempts), 4),
        given_up_by_default_clients=tally.given_up,
        given_up_share=round(tally.given_up / max(1, requests), 4),
        lost=tally.lost,
        wrong=len(tally.wrong),
        slowest_s=round(tally.slowest_s, 2),
        log=dict(tally.log),
        deaths=dict(Counter(f"{death.kind}, {_how(death.status)}" for death in fleet.deaths)),
        redis_shaken=dict(redis.shaken),
        redis_trouble=dict(Counter(why for _, why in fleet.troubled)),
        work=counted,
        faults=[*tally.wrong[:10], *needless[:10], *fleet.faults, *(["requests were lost"] if tally.lost else [])],
    )


def _how(status: int) -> str:
    return "killed" if status == -9 else "stopped"


@dataclass(frozen=True, slots=True)
class Site:
    """Where the processes find their files."""

    directory: Path
    plan: Plan

    def backends(self, count: int, record: Path | None) -> list[Member]:
        return [self._backend(f"backend {n}", record) for n in range(count)]

    def _backend(self, name: str, record: Path | None) -> Member:
        port = steady_port()
        if self.plan.backend == "toy":
            argv = [sys.executable, str(ROOT / "tests/gateway/counting_engine.py"), "--port", str(port)]
            argv += [] if record is None else ["--record", str(record)]
        else:
            model = str(self.directory / "tiny.gguf")
            argv = [sys.executable, "-m", "backend.server", "--model", model, "--port", str(port)]
            argv += ["--kv-bytes", str(1 << 22)]
        return Member(name, "backend", argv, f"http://127.0.0.1:{port}")

    def models(self, backends: list[Member]) -> Path:
        """A models file over these, of its own."""
        path = self.directory / f"models{len(list(self.directory.glob('models*')))}.yaml"
        urls = "".join(f"      - url: {member.url}\n" for member in backends)
        path.write_text(f"version: 1\nmodels:\n  model:\n    backends:\n{urls}")
        return path

    def gateway(self, name: str, models: Path, redis: str | None) -> Member:
        port = steady_port()
        kind: Kind = "gateway"
        argv = [sys.executable, "-m", "gateway.cli", "gateway", "--models", str(models), "--port", str(port)]
        argv += ["--drain-timeout-s", "5", "--health-interval-s", "0.5", "--first-byte-timeout-s", "20"]
        if redis is not None:
            argv += [
                "--redis",
                redis,
                "--redis-timeout-s",
                str(self.plan.redis_timeout_s),
                "--policy",
                str(self.directory / "policy.yaml"),
            ]
        return Member(name, kind, argv, f"http://127.0.0.1:{port}")


def steady_port() -> int:
    """A port that is free and stays so while its process is away: the kernel gives none below these to connections."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(ephemeral // 2, ephemeral)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@contextmanager
def files(directory: Path, plan: Plan) -> Iterator[Site]:
    """Write what the processes read."""
    (directory / "policy.yaml").write_text(POLICY)
    if plan.backend != "toy":
        from tests.backend.tiny_gguf import write_gguf  # noqa: PLC0415  # brings numpy and torch

        write_gguf(directory / "tiny.gguf", KEYS)
    yield Site(directory, plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Plan()
    parser.add_argument("--backend", choices=["toy", "engine"], default=defaults.backend)
    for name in ("gateways", "backends", "clients", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--redis-timeout-s", type=float, default=defaults.redis_timeout_s)
    parser.add_argument("--kill-every-s", type=float, default=defaults.kill_every_s)
    parser.add_argument("--roll", action="store_true", help="restart all in turn with SIGTERM, besides the kills")
    parser.add_argument("--shake-redis", action="store_true", help="freeze the Redis, or restart it empty, besides")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = vars(parser.parse_args())
    path = options.pop("json")
    plan = Plan(**options)
    with tempfile.TemporaryDirectory() as directory:
        report = asdict(asyncio.run(soak(plan, Path(directory))))
    result: dict[str, Any] = {"plan": asdict(plan), "report": report}
    if path is not None:
        from benchmarks.report import circumstances  # noqa: PLC0415  # brings torch

        path.write_text(json.dumps(circumstances(threads=1) | result, indent=1) + "\n")
    print(json.dumps(result, indent=1))  # noqa: T201
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
