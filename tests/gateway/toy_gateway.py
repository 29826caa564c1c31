"""A gateway over a toy model that repeats what it was told last, as a process: prints its base URL, runs until stopped.

Clients decide by what they say what they will hear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from launched import launch_gateway
from toy_backend import ToyBackend
from toy_model import EOS, FILES, TOKENIZER, ToyModel, ids
from toy_tools import TEMPLATE

from backend.protocol import Sampling, VerifiedToken


class Parrot(ToyModel):
    """Repeats the last message, or the whole prompt where there are no messages."""

    def next(self, context: Sequence[int], generated: int, sampling: Sampling, top: int = 0) -> VerifiedToken:
        prompt = TOKENIZER.decode(list(context[: len(context) - generated]), skip_special_tokens=False)
        said = prompt.removesuffix("|assistant:").rpartition(":::")[2]
        self.script = [*ids(said), EOS]
        return super().next(context, generated, sampling, top)


async def main() -> None:
    files = msgspec.structs.replace(FILES, chat_template=TEMPLATE)
    async with ToyBackend(model=Parrot(), files=files) as toy, launch_gateway(toy.url) as gateway:
        print(gateway.url, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
