"""Work that ends when the client goes.

The server cancels nothing by itself when a client closes its connection: it only says so to whoever asks. So whatever a
request makes us do is raced against that word.

The server says the same once an answer has been sent to its end. Work therefore sends that end last, behind all else
that it has to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from gateway.errors import ClientLeft

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, whose request has been read to its end; cancel it and raise `ClientLeft` once the client is gone."""
    # The work has a task of its own, so that waking it up for each piece of a stream does not lead through all the
    # layers that stand above it here.
    working = asyncio.create_task(work)
    watching = True
    try:
        async with asyncio.timeout(None) as watch:

            def end(_: asyncio.Task[T]) -> None:
                if watching:
                    watch.reschedule(asyncio.get_running_loop().time())

            working.add_done_callback(end)
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        assert working.done()
    finally:
        watching = False
        left = not working.done()
        if left:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    if left:
        raise ClientLeft
    return working.result()
