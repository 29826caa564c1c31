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
    watching = asyncio.create_task(_gone(receive))
    try:
        async with asyncio.timeout(None) as stay:

            def end(_: asyncio.Task[None]) -> None:
                stay.reschedule(asyncio.get_running_loop().time())

            watching.add_done_callback(end)
            try:
                return await work
            finally:
                watching.remove_done_callback(end)
    except TimeoutError:
        if not stay.expired():
            raise
        raise ClientLeft from None
    finally:
        watching.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
