"""Waiting for a change of shared state inside one event loop, and tasks that must not end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

_LOG = logging.getLogger(__name__)

RETRY_S = 1.0


async def kept_up(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Runs an endless loop; an error is logged and the loop started again."""
    while True:
        try:
            await loop()
            return
        except Exception:
            _LOG.exception("%s failed; it goes on in %g s", name, RETRY_S)
            await asyncio.sleep(RETRY_S)


class Changes:
    """`notify()` wakes everybody who waits; a waiter looks at the state again and decides."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, until: float) -> bool:
        """Waits for the next change or the monotonic time `until`; False when the time is over."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        event = self._event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await event.wait()
        return True
