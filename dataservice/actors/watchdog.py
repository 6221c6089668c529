"""Ends a process whose event loop has stood still for too long, after printing all its stacks.

Invariants: the clock runs outside the interpreter, so it strikes also while something holds the
interpreter's lock; there is one a process; work that ends takes it along.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
STDERR = 2
BEATS = 8
"""The loop shows so often within the time allowed that it runs."""


async def watched(work: Awaitable[T], *, still_s: float) -> T:
    """Awaits `work`. When the loop does nothing for `still_s` seconds meanwhile, the stacks of
    all threads go to standard error and the process ends with code 1: whoever keeps it starts
    another."""
    beating = asyncio.ensure_future(keep_beating(still_s))
    try:
        return await work
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def keep_beating(still_s: float) -> None:
    """Until it is cancelled."""
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        while True:
            faulthandler.dump_traceback_later(still_s, exit=True, file=STDERR)
            await asyncio.sleep(still_s / BEATS)
