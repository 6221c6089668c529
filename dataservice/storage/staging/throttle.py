"""Holds the copies of all jobs on a node together to a number of bytes a second.

Invariants: the jobs share one file that says when the line is free again, on the machine's own
clock since it was started; a job takes the line for one range at a time, so that one that ends has
taken no more than it read.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable

from dataservice.storage.staging.locks import FileLock

_FILE_NAME = ".rate"
_STATE = struct.Struct("<36sd")
_LOCK_TIMEOUT_S = 30.0
_LATE_S = 0.05
"""By which a thread may wake too late without costing the rate."""
_LONGEST_S = 3600.0
"""A line that is taken for longer was not taken by a job: the file is damaged."""
_LOOK_S = 0.25


class Throttle:
    """For threads and processes that share a cache directory."""

    def __init__(
        self,
        cache_dir: str,
        *,
        max_bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = max_bytes_per_s
        self._clock = clock
        self._lock = FileLock(os.path.join(cache_dir, _FILE_NAME))
        self._boot = _boot_id()
        self._turn = threading.Lock()

    def take(self, size_bytes: int, stopped: threading.Event) -> None:
        """Wait for the turn of `size_bytes`, or until stopped."""
        while not stopped.is_set():
            if not self._turn.acquire(timeout=_LOOK_S):
                continue
            try:
                while (wait_s := self.claim(size_bytes)) and not stopped.wait(wait_s):
                    pass
                return
            finally:
                self._turn.release()

    def claim(self, size_bytes: int) -> float:
        """0: these bytes may be read, and are taken into account; else seconds until the line is
        free."""
        with self._lock.held(_LOCK_TIMEOUT_S) as fd:
            now = self._clock()
            state = os.pread(fd, _STATE.size, 0)
            boot, free_at = _STATE.unpack(state) if len(state) == _STATE.size else (b"", 0.0)
            if boot != self._boot or not free_at <= now + _LONGEST_S:
                free_at = 0.0
            if free_at > now:
                return float(free_at - now)
            free_at = max(free_at, now - _LATE_S) + size_bytes / self._rate
            os.pwrite(fd, _STATE.pack(self._boot, free_at), 0)
        return 0.0

    def close(self) -> None:
        self._lock.close()


def _boot_id() -> bytes:
    """Tells one run of the machine, and of its clock, from another; 36 bytes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(36).ljust(36, b"-")
    except OSError:
        return b"-" * 36
