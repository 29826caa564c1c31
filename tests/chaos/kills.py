"""A replica killed in mid-stream, again and again, at a random point each time, with another one up:

    python -m tests.chaos.kills --kills 50

Two engines over a tiny random model, in processes of their own; each time it is the one that is at work that dies.
Every answer is held against the undisturbed one, event by event. Ends with 1 where one differs, and writes
benchmarks/results/kills.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gateway"))

from engine_process import KEYS, EngineProcess, stream, until_well  # noqa: E402
from launched import Gateway, launch_models  # noqa: E402
from redis_process import free_port  # noqa: E402

from benchmarks.report import circumstances, write  # noqa: E402
from gateway.models_file import ModelConfig  # noqa: E402
from tests.backend.tiny_gguf import write_gguf  # noqa: E402


async def kill_once(gateway: Gateway, engines: list[EngineProcess], expected: list[str]) -> tuple[int, bool, bool]:
    """Behind how many events it was killed, whether a call was in flight there, and whether the answer is right."""
    (group,) = gateway.models.groups
    after = random.randrange(1, len(expected) - 2)
    busy = False

    def kill() -> None:
        nonlocal busy
        loads = [replica.in_flight for replica in group.replicas]
        busy = max(loads) > 0
        victims.append(engines[loads.index(max(loads))])
        victims[0].kill()

    victims: list[EngineProcess] = []
    right = await stream(gateway, kill, after) == expected
    victims[0].start()
    await until_well(gateway)
    return after, busy, right


async def run(kills: int) -> list[tuple[int, bool, bool]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_gguf(Path(folder) / "tiny.gguf", KEYS)
        engines = [EngineProcess(model, free_port()) for _ in range(2)]
        for engine in engines:
            engine.start()
            stack.callback(engine.kill)
        config = ModelConfig("tiny", tuple(engine.url for engine in engines))
        async with launch_models((config,), health_timeout_s=30.0) as gateway:
            await until_well(gateway)
            expected = await stream(gateway)
            return [await kill_once(gateway, engines, expected) for _ in range(kills)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    seen = asyncio.run(run(options.kills))
    right = sum(right for _, _, right in seen)
    said = {
        "kills": options.kills,
        "seed": options.seed,
        "equal": right,
        "with_a_call_in_flight": sum(busy for _, busy, _ in seen),
        "behind_events": [after for after, _, _ in seen],
    }
    sys.stdout.write(json.dumps(said) + "\n")
    write("kills", circumstances(threads=1) | said)
    sys.exit(right != options.kills)


if __name__ == "__main__":
    main()
