"""Waiting for a change of shared state inside one event loop, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time


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
