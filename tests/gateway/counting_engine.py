"""The toy backend as a process that takes its time and writes down what it computes.

`counting_engine.py --port N --delay-s 0.02 [--record FILE]`. A line of the record is the moment, the log (a digest of
prompt and seed), its first position computed and how many. It stands before the answer is sent: whoever is killed
leaves no work unrecorded.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import time
from dataclasses import dataclass

from toy_backend import Fault, ToyBackend, Wait

from backend.protocol import VerifyRequest, VerifyResponse


@dataclass
class CountingBackend(ToyBackend):
    record: int | None = None
    """A file descriptor; lines are appended to it."""

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        response = super().verify(request)
        if self.record is not None:
            prompt = request.context[: len(request.context) - request.generated]
            log = hashlib.sha256(f"{prompt} {request.sampling.seed}".encode()).hexdigest()[:16]
            line = f"{time.time():.4f} {log} {request.generated} {len(response.tokens)}\n"
            os.write(self.record, line.encode())
        return response


async def main(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()

    def slowly(path: str, nth: int) -> Fault:
        if path != "/v1/verify":
            return None
        event = asyncio.Event()
        loop.call_later(options.delay_s, event.set)
        return Wait(event)

    record = None if options.record is None else os.open(options.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with CountingBackend(port=options.port, faults=slowly, record=record):
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay-s", type=float, default=0.02)
    parser.add_argument("--record")
    asyncio.run(main(parser.parse_args()))
