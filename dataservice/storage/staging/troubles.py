"""What went wrong in staging: which shard is tried again when, how full the disk is, what was said.

Invariants: a shard that fails is left alone for half a second, then twice as long each time, up to
a minute; a full disk is believed for as long; a warning with the same cause is given once.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

from dataservice.storage.staging.needs import Need

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Troubles:
    """Thread-safe."""

    def __init__(self, cache_dir: str, clock: Callable[[], float]) -> None:
        self._cache_dir = cache_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses: dict[str, tuple[int, float]] = {}
        """Failures in a row of a copy, and when to try it again."""
        self._full: tuple[int, float] | None = None
        """Bytes of copies the disk had room for, and until when that is believed."""
        self._warned: set[str] = set()
        self.errors = 0
        self.stalls = 0
        self.disk_full = 0
        self.last_error = ""

    def failed(self, name: str, need: Need, error: Exception, held_bytes: int) -> None:
        """A copy failed beside `held_bytes` of other copies."""
        what = f"staging {need.shard.source}/{need.shard.name}: {error}"
        with self._lock:
            failures = self._pauses.get(name, (0, 0.0))[0] + 1
            pause = min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LAST_PAUSE_S)
            self._pauses[name] = failures, self._clock() + pause
            self.errors += 1
            if isinstance(error, OSError) and error.errno in _FULL:
                self.disk_full += 1
                self._full = held_bytes, self._clock() + pause
                what = (
                    f"the disk of {self._cache_dir} is full at {held_bytes:,} bytes of copies: "
                    f"{what}"
                )
            self.last_error = what
        _LOG.warning("%s; tried again in %.3g s, read from its origin until then", what, pause)

    def went_well(self, name: str) -> None:
        with self._lock:
            self._pauses.pop(name, None)

    def failures(self, name: str) -> int:
        """In a row."""
        with self._lock:
            return self._pauses.get(name, (0, 0.0))[0]

    def paused(self, name: str) -> bool:
        with self._lock:
            return self._pauses.get(name, (0, 0.0))[1] > self._clock()

    def room(self) -> int | None:
        """What the disk was found to have room for lately; None when it was not full."""
        with self._lock:
            if self._full is not None and self._full[1] <= self._clock():
                self._full = None
            return None if self._full is None else self._full[0]

    def stalled(self, what: str) -> None:
        """A read was given up at its deadline."""
        with self._lock:
            self.stalls += 1
            self.last_error = f"storage stall: {what}"
        _LOG.warning("storage stall while staging: %s", what)

    def warn(self, key: str, text: str) -> bool:
        """False when it was said before."""
        with self._lock:
            if key in self._warned:
                return False
            self._warned.add(key)
        _LOG.warning("%s", text)
        return True

    def no_longer(self, key: str) -> None:
        with self._lock:
            self._warned.discard(key)
