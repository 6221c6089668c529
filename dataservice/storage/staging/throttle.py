"""Holds the copies of all jobs on a node together to a number of bytes a second.

Invariants: the jobs share one file that says when the line is free again, on the machine's own
clock since it was started; a job that dies leaves nothing behind that holds up the others.
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

    def take(self, size_bytes: int, stopped: threading.Event) -> None:
        """Wait for the turn of `size_bytes`, or until stopped."""
        wait_s = self.claim(size_bytes)
        if wait_s > 0:
            stopped.wait(wait_s)

    def claim(self, size_bytes: int) -> float:
        """Seconds until these bytes may be read; they are taken into account from now on."""
        with self._lock.held(_LOCK_TIMEOUT_S) as fd:
            now = self._clock()
            state = os.pread(fd, _STATE.size, 0)
            boot, free_at = _STATE.unpack(state) if len(state) == _STATE.size else (b"", 0.0)
            if boot != self._boot:
                free_at = 0.0
            begin: float = max(now, free_at)
            os.pwrite(fd, _STATE.pack(self._boot, begin + size_bytes / self._rate), 0)
        return begin - now

    def close(self) -> None:
        self._lock.close()


def _boot_id() -> bytes:
    """Tells one run of the machine, and of its clock, from another; 36 bytes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(36).ljust(36, b"-")
    except OSError:
        return b"-" * 36
