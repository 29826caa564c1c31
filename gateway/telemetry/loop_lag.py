"""How late the event loop is. Whatever becomes ready waits so long for its turn, and no request's record shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gateway.telemetry.histogram import Histogram

INTERVAL_S = 0.25


async def watch_lag(
    lag: Histogram, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Observe it a few times a second, for ever. `clock` counts seconds."""
    while True:
        due = clock() + INTERVAL_S
        await sleep(INTERVAL_S)
        lag.observe(max(0.0, clock() - due))
