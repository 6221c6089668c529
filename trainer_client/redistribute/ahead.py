"""One owned thread that keeps an iterator some items ahead of its consumer.

Invariants: at most `depth` items are ready; what the iterator raises is raised in `take`, behind
the items before it, every time; the iterator is advanced only while there is room, so that threads
of several ranks whose consumers stand at the same item come to the same item; `close` joins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dataservice.errors import DataServiceError, DeadlineExceeded
from trainer_client.patience import Reminder

log = logging.getLogger(__name__)

Item = TypeVar("Item")

SLICE_S = 0.25
"""Longest sleep before a waiting consumer looks around again."""
PATIENCE_S = 5.0
"""How long a thread that is to end may take before what it waits for is interrupted."""
JOIN_S = 30.0


class Waiting(Generic[Item]):
    """The same without a thread: the consumer waits for every item."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._error: BaseException | None = None

    def take(self) -> tuple[Item | None, float]:
        """The next item, None behind the last, and the seconds waited for it."""
        if self._error is not None:  # the iterator itself would say that it has ended
            raise self._error
        started = time.monotonic()
        try:
            return next(self._items, None), time.monotonic() - started
        except BaseException as error:
            self._error = error
            raise


class Ahead(Generic[Item]):
    """`doing` says in words what the iterator does now, for whoever waits for it."""

    def __init__(
        self,
        items: Iterator[Item],
        *,
        depth: int,
        timeout_s: float,
        name: str,
        doing: Callable[[], str],
    ) -> None:
        self._items, self._depth, self._timeout_s = items, depth, timeout_s
        self._name, self._doing = name, doing
        self._changed = threading.Condition()
        self._ready: deque[Item] = deque()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self) -> tuple[Item | None, float]:
        """The next item, None behind the last, and the seconds waited for it."""
        started, reminder = time.monotonic(), Reminder()
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return None, time.monotonic() - started
                left_s = started + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{self._name} waited {self._timeout_s:.3g} s; it is {self._doing()}"
                    )
                reminder.remind(self._name, self._doing(), self._timeout_s)
                self._changed.wait(min(left_s, SLICE_S))
            item = self._ready.popleft()
            self._changed.notify_all()
        return item, time.monotonic() - started

    def close(self, interrupt: Callable[[], object]) -> None:
        """Wait until the thread has filled its room, as other ranks may wait for that, and ended.

        `interrupt` is called where that takes longer than PATIENCE_S. Idempotent.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            return
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            try:
                interrupt()
            except Exception as error:  # a generator that runs cannot be closed
                log.warning("%s could not interrupt its source: %s", self._name, error)
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            raise DataServiceError(
                f"the thread of {self._name} did not end within {JOIN_S:.0f} s; it is "
                f"{self._doing()}"
            )
        self._ready.clear()

    def _run(self) -> None:
        try:
            while self._has_room():
                item = next(self._items, None)
                with self._changed:
                    if item is None:
                        self._ended = True
                    else:
                        self._ready.append(item)
                    self._changed.notify_all()
                if item is None:
                    return
        except BaseException as error:  # raised again in take(), whatever it is
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            return len(self._ready) < self._depth
