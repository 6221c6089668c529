"""A small thread-safe least-recently-used cache for values that are pure functions of their key.

Invariants: never more than `capacity` values; values are computed outside the lock, so two threads
may compute the same one, and both get an equal value.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, capacity: int) -> None:
        """From now on at least so many."""
        self._capacity = max(self._capacity, capacity)

    def __contains__(self, key: K) -> bool:
        with self._lock:
            return key in self._values

    def get(self, key: K, compute: Callable[[], V]) -> V:
        """The value of `key`, from `compute()` when it is not here."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = compute()
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._capacity:
                self._values.popitem(last=False)
        return value
