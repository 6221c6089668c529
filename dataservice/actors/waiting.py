"""Waiting for a change of shared state inside one event loop, and tasks that must not end.

Invariants: every wait has an end; who is told of a change looks at the state again, for another may
have been told before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable

_LOG = logging.getLogger(__name__)

RETRY_S = 1.0
ANYTHING = ""
"""The topic of those who wait for any change."""
AT_ONCE = 2
"""Waiters that are woken in one turn of the event loop, which takes one new call a turn; one waiter
takes up to a millisecond."""
GAP_S = 0.001
"""Between two waiters that are woken gently: as much again as one takes."""


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
    """A waiter that is woken looks at the state again and decides.

    `notify()` wakes everybody; `notify(topic, ...)` those who wait for one of the topics, and those
    who wait for none in particular. At most AT_ONCE are woken in one turn of the event loop, those
    first that waited first, so that a thousand of them hold up nobody else's call.
    `notify_gently(topic, ...)` is for news that nobody is in a hurry for: those who wait for one of
    the topics are woken one by one, and between two there is time for as much of other work.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[asyncio.Future[bool], None]] = {}
        self._due: deque[asyncio.Future[bool]] = deque()
        self._waking = False
        self._gently_due: dict[Hashable, None] = {}
        self._waking_gently = False

    def notify(self, *topics: Hashable) -> None:
        for topic in dict.fromkeys((*topics, ANYTHING)) if topics else tuple(self._waiting):
            self._due.extend(self._waiting.pop(topic, ()))
        if not self._waking:
            self._wake()

    def notify_gently(self, *topics: Hashable) -> None:
        self._gently_due.update(dict.fromkeys(topics))
        if not self._waking_gently:
            self._wake_gently()

    async def wait(self, until: float, topic: Hashable = ANYTHING) -> bool:
        """Waits for the next change or the monotonic time `until`; False when the time is over."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        self._waiting.setdefault(topic, {})[woken] = None
        timer = loop.call_later(left, _tell, woken, False)
        try:
            return await woken
        finally:
            timer.cancel()
            others = self._waiting.get(topic)
            if others is not None:
                others.pop(woken, None)
                if not others:
                    del self._waiting[topic]

    def _wake(self) -> None:
        for _ in range(min(AT_ONCE, len(self._due))):
            _tell(self._due.popleft(), True)
        self._waking = bool(self._due)
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake_gently(self) -> None:
        self._waking_gently = False
        while self._gently_due and not self._waking_gently:
            topic = next(iter(self._gently_due))
            del self._gently_due[topic]
            for waiter in self._waiting.pop(topic, ()):
                _tell(waiter, True)
                self._waking_gently = True
        if self._waking_gently:
            asyncio.get_running_loop().call_later(GAP_S, self._wake_gently)


def _tell(woken: asyncio.Future[bool], changed: bool) -> None:
    if not woken.done():
        woken.set_result(changed)
