"""The toy backend as a process with the engine's flags: `python toy_engine.py --host H --port N [--fail]`."""

from __future__ import annotations

import asyncio
import sys

from toy_backend import ToyBackend


async def main(port: int) -> None:
    async with ToyBackend(port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    if "--fail" in sys.argv:
        sys.exit(3)
    asyncio.run(main(int(sys.argv[sys.argv.index("--port") + 1])))
