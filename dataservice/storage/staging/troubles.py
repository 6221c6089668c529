"""What went wrong in staging: which shard is tried again when, how full the disk is, what was said.

Invariants: a shard that fails is left alone for half a second, then twice as long each time, up to
a minute, less a random part of it, so that the nodes of a cluster whose origin failed do not come
back to it together; a directory that fails likewise; a full disk is believed for as long; a warning
with the same cause is given once.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable, Sequence

from dataservice.storage.staging.needs import Need

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DIRECTORY = ""
"""In place of a copy's name."""


def part_of_pause() -> float:
    """From a half to all of it."""
    return random.uniform(0.5, 1.0)


class Troubles:
    """Thread-safe."""

    def __init__(
        self, cache_dir: str, clock: Callable[[], float], part: Callable[[], float] = part_of_pause
    ) -> None:
        self._cache_dir = cache_dir
        self._clock = clock
        self._part = part
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
            pause = self._pause(name)
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

    def _pause(self, name: str) -> float:
        """Of another failure in a row; seconds."""
        failures = self._pauses.get(name, (0, 0.0))[0] + 1
        pause = self._part() * min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 16), _LAST_PAUSE_S)
        self._pauses[name] = failures, self._clock() + pause
        return float(pause)

    def directory_failed(self, error: Exception) -> float:
        """It could not be looked at or written to; seconds after which to try again."""
        what = f"the cache directory {self._cache_dir} cannot be used: {error}"
        with self._lock:
            pause = self._pause(_DIRECTORY)
            self.errors += 1
            self.last_error = what
        self._warn(what, f"{what}; shards are read from their origins until it can")
        return pause

    def went_well(self, name: str = _DIRECTORY) -> None:
        """Of a copy; else the directory could be looked at."""
        with self._lock:
            self._pauses.pop(name, None)

    def failures(self, name: str = _DIRECTORY) -> int:
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

    # ---- warnings ----------------------------------------------------------------------------

    def too_large(self, need: Need, room: int, *, of_budget: bool) -> None:
        limit = f"the budget of {self._cache_dir}" if of_budget else "what its disk holds"
        self._warn(
            f"{_name(need)} too large",
            f"{_name(need)} has {need.shard.content_bytes:,} bytes, more than {limit} ({room:,}): "
            "it is not staged, but read from its origin",
        )

    def disk_has_no_room(self, room: int, budget: int, sizes: Sequence[int]) -> None:
        """`sizes`: bytes of the shards that it has no room for."""
        if self._warn(
            "disk",
            f"the disk of {self._cache_dir} has room for {room:,} bytes of copies, the budget is "
            f"{budget:,}: {len(sizes):,} shards of {sum(sizes):,} bytes that are needed next are "
            "read from their origins",
        ):
            self.disk_full += 1

    def disk_has_room(self) -> None:
        """The next time that it has none is told of again."""
        with self._lock:
            self._warned.discard("disk")

    def two_budgets(self, own: int, others: int) -> None:
        self._warn(
            "budget",
            f"the jobs that share {self._cache_dir} have budgets of {own:,} and {others:,} bytes: "
            "the smaller one holds for all of them",
        )

    def damaged(self, need: Need, found: int) -> None:
        """A copy has `found` bytes."""
        self._warn(
            f"{_name(need)} {found}",
            f"the copy of {_name(need)} in {self._cache_dir} has {found:,} bytes in place of "
            f"{need.shard.content_bytes:,}: removed",
        )

    def untold(self, error: Exception) -> None:
        self._warn(
            "untold",
            f"the other jobs that share {self._cache_dir} are not told what this one needs, and "
            f"may drop it: {error}",
        )

    def _warn(self, key: str, text: str) -> bool:
        """False when it was said before."""
        with self._lock:
            if key in self._warned:
                return False
            self._warned.add(key)
        _LOG.warning("%s", text)
        return True


def _name(need: Need) -> str:
    return f"shard {need.shard.source}/{need.shard.name}"
