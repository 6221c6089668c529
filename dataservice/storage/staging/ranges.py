"""Ranges of origins, several at once, each with its deadline and its turn at the throttle.

Invariants: at most `window` ranges of a copy are asked for or held; a range that does not come is
given up at its deadline and asked for once more by another thread; whoever waits here stops within
a quarter of a second when told to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from dataservice.errors import DataServiceError, StorageError, StorageTimeout
from dataservice.masking import mask_urls
from dataservice.storage.backends import ObjectStat
from dataservice.storage.objects import ObjectStore
from dataservice.storage.staging.throttle import Throttle

T = TypeVar("T")

RANGE_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 2
_LOOK_S = 0.25


class CopyStopped(DataServiceError):
    """The copy was given up because the stager stops."""


class Ranges:
    """For any number of copies at once."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        threads: int,
        deadline_s: float,
        stopped: threading.Event,
        throttle: Throttle | None = None,
        on_stall: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stager-read")
        self._deadline_s = deadline_s
        self._stopped = stopped
        self._throttle = throttle
        self._on_stall = on_stall

    def stat(self, url: str) -> ObjectStat:
        """Raises FileNotFoundError, StorageError."""

        def stat() -> ObjectStat:
            return self._patiently(lambda: self._store.stat(url, deadline_s=self._deadline_s))

        asked = self._pool.submit(stat)
        self._wait_for([asked])
        return asked.result()

    def fetched(
        self,
        url: str,
        size_bytes: int,
        *,
        window: int,
        in_order: bool,
        on_range: Callable[[int, int], None] = lambda _bytes, _left: None,
    ) -> Iterator[tuple[int, bytes]]:
        """(number, content) of each range; in the order in which they come unless `in_order`.

        `on_range` gets the bytes that came and how many ranges have not been asked for yet. Raises
        StorageError, also when the object is shorter, and CopyStopped.
        """
        count = -(-size_bytes // RANGE_BYTES)
        running: dict[Future[bytes], int] = {}
        asked = 0
        try:
            while asked < count or running:
                while asked < count and len(running) < window:
                    offset = asked * RANGE_BYTES
                    wanted = min(RANGE_BYTES, size_bytes - offset)
                    running[self._pool.submit(self._read, url, offset, wanted)] = asked
                    asked += 1
                    on_range(0, count - asked)
                for future in self._wait_for(list(running)[: 1 if in_order else None]):
                    data = future.result()
                    on_range(len(data), count - asked)
                    yield running.pop(future), data
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait_for(self, futures: list[Future[T]]) -> list[Future[T]]:
        """Those that have ended, at least one."""
        while not self._stopped.is_set():
            done, _ = wait(futures, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            if done:
                return [future for future in futures if future in done]
        raise CopyStopped("the copy was stopped")

    def _read(self, url: str, offset: int, size: int) -> bytes:
        if self._throttle is not None:
            self._throttle.take(size, self._stopped)
        data = self._patiently(
            lambda: self._store.read(url, offset, size, deadline_s=self._deadline_s)
        )
        if len(data) != size:
            raise StorageError(
                f"{mask_urls(url)} ends at {offset + len(data)}, expected {offset + size} bytes"
            )
        return data

    def _patiently(self, call: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS):
            if self._stopped.is_set():
                break
            try:
                return call()
            except StorageTimeout as error:
                if self._stopped.is_set():
                    break
                self._on_stall(str(error))
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise CopyStopped("the copy was stopped")
