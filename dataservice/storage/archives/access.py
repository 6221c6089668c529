"""Does one small thing for each of many images: in one thread where reads are quick, side by side
where each of them waits.

Invariants: results stand in the order of the items; a read that fails in a way that may pass is
retried and then that item's result, a StorageError, and no other's; every call ends within the
deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from dataservice.errors import StorageError
from dataservice.storage.backends import ObjectStat, local_path
from dataservice.storage.objects import Store

T = TypeVar("T")
R = TypeVar("R")

_SIDE_BY_SIDE = 16
_QUICK_S = 0.0005
"""An item that takes longer waits for its storage more than for this machine."""


class Access(Protocol):
    def read(self, url: str, offset: int, size: int) -> bytes: ...

    def stat(self, url: str) -> ObjectStat: ...


class _Direct:
    """Within one call of the store, which has the deadline."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, url: str, offset: int, size: int) -> bytes:
        return self._store.backend(url).read(url, offset, size)[0]

    def stat(self, url: str) -> ObjectStat:
        return self._store.backend(url).stat(url)


class _Patient:
    """A call of the store for each read."""

    def __init__(self, store: Store, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def read(self, url: str, offset: int, size: int) -> bytes:
        return self._store.read(url, offset, size, deadline_s=self._deadline_s)

    def stat(self, url: str) -> ObjectStat:
        return self._store.stat(url, deadline_s=self._deadline_s)


class ManyReads:
    """Owns its threads: close it."""

    def __init__(self, store: Store, *, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._direct = _Direct(store)
        self._patient = _Patient(store, deadline_s)
        self._pool = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="index-read")
        self._quick: dict[str, bool] = {}

    def each(
        self, origin: str, call: Callable[[Access, T], R], items: Sequence[T]
    ) -> list[R | StorageError]:
        """`call` of each item; all read from the archive or folder `origin`."""
        if not items:
            return []
        if self._quick.get(origin, local_path(origin) is not None):
            try:
                began = time.monotonic()
                done: list[R | StorageError] = self._store.run(
                    lambda: [call(self._direct, item) for item in items],
                    f"read {len(items)} images of {origin}",
                    self._deadline_s,
                )
                self._quick[origin] = time.monotonic() - began < _QUICK_S * len(items)
                return done
            except (StorageError, FileNotFoundError):
                self._quick[origin] = False
        return list(self._pool.map(lambda item: self._one(call, item), items))

    def _one(self, call: Callable[[Access, T], R], item: T) -> R | StorageError:
        try:
            return call(self._patient, item)
        except StorageError as error:
            return error
        except FileNotFoundError as error:
            return StorageError(f"gone while it was looked at: {error}")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
