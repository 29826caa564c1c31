"""Several asynchronous generators as one, in the order in which their items come.

Each source is at most one item ahead of the consumer. The first error ends the merge and closes every source.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all sources. Closing the merge cancels what is under way in each of them."""
    # A dict, not a set: items that are ready together come out in the order of the sources.
    running = {asyncio.create_task(_next(source)): source for source in sources}
    try:
        while running:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                item = task.result()
                source = running.pop(task)
                if item is not None:
                    running[asyncio.create_task(_next(source))] = source
                    yield item[0]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[T]) -> tuple[T] | None:
    async for item in source:
        return (item,)
    return None
