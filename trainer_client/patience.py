"""How long somebody waits, what is said of it meanwhile, and with which error it ends.

Invariants: a loop that asks its `Patience` ends by the deadline, or when its owner closes.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    StorageError,
)

LOG = logging.getLogger(__name__)

PASSING = (ServiceUnavailable, DeadlineExceeded, StorageError)
"""Errors that may pass: tried again for as long as somebody has patience."""
BACKOFF_S = (0.05, 2.0)
"""First and longest pause between attempts."""
FIRST_REMINDER_S = 5.0
REMINDER_S = 30.0
"""A wait is told in the log after the first time, then again and again after the second."""


class Closed(Exception):
    """Ends a loop whose owner closes the session; never reaches the user."""


class Reminder:
    """Says in the log, now and then, what somebody waits for."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next_s = FIRST_REMINDER_S

    def remind(self, who: str, what: str, timeout_s: float) -> None:
        waited_s = time.monotonic() - self._started
        if waited_s >= self._next_s:
            self._next_s = waited_s + REMINDER_S
            left_s = max(0.0, timeout_s - waited_s)
            LOG.warning(
                "%s has waited %.0f s: %s (gives up in %.0f s)", who, waited_s, what, left_s
            )


class Patience:
    """How long a loop of calls may go on: until `stop` is set, or until a deadline."""

    def __init__(self, stop: threading.Event, *, timeout_s: float | None = None) -> None:
        self._stop = stop
        self._started = time.monotonic()
        self._timeout_s = timeout_s

    def left_s(self, at_most: float) -> float:
        """Seconds that the next call may take; raises Closed. 0 once the deadline has passed."""
        if self._stop.is_set():
            raise Closed
        if self._timeout_s is None:
            return at_most
        return max(0.0, min(at_most, self._timeout_s - self.waited_s))

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self.left_s(1.0) == 0.0

    def pause(self, attempt: int) -> None:
        """Sleep before the next attempt: longer each time, with jitter."""
        shortest, longest = BACKOFF_S
        delay = min(longest, shortest * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)
        self._stop.wait(self.left_s(delay))


def late_error(text: str, problem: DataServiceError | None) -> DataServiceError:
    """What a wait that ended at its deadline raises, given what went wrong last, if anything."""
    if isinstance(problem, ServiceUnavailable):
        return ServiceUnavailable(f"{text}: {problem}; the stream's cursor is intact")
    return DeadlineExceeded(f"{text}: {problem}" if problem is not None else text)
