"""What a stager tells about itself: counters, the rate at which it copies, what it cannot stage."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_RATE_OVER_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    cached_bytes: int
    """Of the directory, copies in progress included."""
    cached_shards: int
    copied_bytes: int
    copied_shards: int
    bytes_per_s: float
    """Read from origins over the last seconds."""
    missing_bytes: int
    """Of the needed shards: what is still to be copied."""
    missing_shards: int
    read_through_bytes: int
    """Of the needed shards: those for which there is no room, read from their origins."""
    read_through_shards: int
    evictions: int
    errors: int
    """Copies that failed."""
    stalls: int
    """Reads given up at their deadline."""
    disk_full: int
    """Times when the disk had less room than the budget allows."""
    last_error: str


class Rate:
    """Bytes a second over the last ten seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = clock()
        self._came: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._came.append((self._clock(), size_bytes))
            self._sum += size_bytes
            self._forget()

    def bytes_per_s(self) -> float:
        with self._lock:
            self._forget()
            return self._sum / max(min(_RATE_OVER_S, self._clock() - self._begun), 1e-3)

    def _forget(self) -> None:
        oldest = self._clock() - _RATE_OVER_S
        while self._came and self._came[0][0] < oldest:
            self._sum -= self._came.popleft()[1]
