"""Copies of shards on a node's own disk: what to copy, what to drop, and copying it safely.

Invariants: a copy has its name only when it is complete, on disk and read back with the right size
and CRC; nothing but files that this module named is ever removed from the folder, and never an
original; the folder holds at most `budget_bytes` (a copy in progress counts); nothing needed
sooner is dropped for something needed later; one process owns a folder.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dataservice.core.packspec import ShardRef
from dataservice.errors import DataServiceError, StaleIndexError, StorageError
from dataservice.storage.objects import ObjectStore, Store, read_chunks, staged_name
from dataservice.storage.tables import TEMPORARY_PREFIX, sync_folder

_LOG = logging.getLogger(__name__)
_LOCK_NAME = ".lock"
_COPY = re.compile(r"[0-9a-f]{32}-[\w.-]+")
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"\d+-[0-9a-f]{32}-[\w.-]+")
_CHUNK_BYTES = 4 * 1024 * 1024
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A shard that the plan will read."""

    shard: ShardRef
    crc32: int
    """Of the whole file; -1 where unknown."""
    next_use: int
    """Order of need: small numbers first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    copy: tuple[Need, ...]
    """In the order in which to copy."""
    evict: tuple[str, ...]
    """Names to drop as room is needed: unneeded first, then needed last first."""
    too_large: tuple[Need, ...]
    """Larger than the whole budget: never staged, always read from the origin."""


class CopyStopped(DataServiceError):
    """The copy was given up because the stager stops."""


def decide(needs: Sequence[Need], cached: Mapping[str, int], budget_bytes: int) -> Decision:
    """What to copy and what may be dropped for it. Pure.

    `cached` maps names of complete copies to their sizes. Shards are taken in the order of need
    until one does not fit; after it nothing is copied, but copies that still fit stay.
    """
    wanted: dict[str, Need] = {}
    for need in sorted(needs, key=lambda need: need.next_use):
        wanted.setdefault(staged_name(need.shard), need)
    room = budget_bytes
    copy: list[Need] = []
    too_large: list[Need] = []
    kept: set[str] = set()
    full = False
    for name, need in wanted.items():
        size = cached.get(name, need.shard.size_bytes)
        if size > budget_bytes:
            too_large.append(need)
        elif size > room:
            full = True
        elif name in cached:
            room -= size
            kept.add(name)
        elif not full:
            room -= size
            copy.append(need)
    unneeded = sorted(name for name in cached if name not in wanted)
    last_first = [name for name in reversed(wanted) if name in cached and name not in kept]
    for name in unneeded:
        if cached[name] <= room:
            room -= cached[name]
            kept.add(name)
    evict = [name for name in unneeded if name not in kept] + last_first
    return Decision(copy=tuple(copy), evict=tuple(evict), too_large=tuple(too_large))


def scan(cache_dir: str) -> dict[str, int]:
    """Remove what a crash left half copied; names and sizes of the complete copies."""
    copies = {}
    for entry in os.scandir(cache_dir):
        if _TEMPORARY.fullmatch(entry.name):
            os.unlink(entry.path)
        elif _COPY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            copies[entry.name] = entry.stat().st_size
    return copies


def copy_shard(
    store: ObjectStore,
    shard: ShardRef,
    crc32: int,
    cache_dir: str,
    *,
    deadline_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Copy a shard into the folder; returns the copy's path.

    `deadline_s` holds for each ranged read. Raises StaleIndexError when the origin is not what the
    index saw, StorageError when it or the disk fails (ENOSPC is its cause's errno), CopyStopped.
    No partial file is left behind in any case.
    """
    name = staged_name(shard)
    temporary = os.path.join(cache_dir, f"{TEMPORARY_PREFIX}{os.getpid()}-{name}")
    final = os.path.join(cache_dir, name)
    try:
        _check_origin(store, shard, deadline_s)
        found = 0
        with open(temporary, "wb") as file:
            for chunk in read_chunks(
                store,
                shard.url,
                size_bytes=shard.size_bytes,
                chunk_bytes=_CHUNK_BYTES,
                deadline_s=deadline_s,
            ):
                if stopped():
                    raise CopyStopped(f"copy of {shard.source}/{shard.name} stopped")
                file.write(chunk)
                found = zlib.crc32(chunk, found)
            file.flush()
            os.fsync(file.fileno())
        _check_origin(store, shard, deadline_s)
        if crc32 not in (-1, found):
            raise StaleIndexError(
                f"shard {shard.source}/{shard.name} has CRC {found:08x}, {crc32:08x} when it was "
                "indexed; run `dataservice index` again"
            )
        _verify_copy(temporary, shard, found)
        os.rename(temporary, final)
        sync_folder(cache_dir)
    except OSError as error:
        raise StorageError(f"staging {shard.source}/{shard.name}: {error}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return final


def _check_origin(store: ObjectStore, shard: ShardRef, deadline_s: float) -> None:
    stat = store.stat(shard.url, deadline_s=deadline_s)
    same_time = not (shard.mtime_ns and stat.mtime_ns) or stat.mtime_ns == shard.mtime_ns
    if stat.size_bytes != shard.size_bytes or not same_time:
        raise StaleIndexError(
            f"shard {shard.source}/{shard.name} changed after it was indexed; "
            "run `dataservice index` again"
        )


def _verify_copy(path: str, shard: ShardRef, expected: int) -> None:
    """Read the copy from the disk itself, not from memory."""
    found = size = 0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
            size += len(chunk)
    if size != shard.size_bytes or found != expected:
        raise StorageError(
            f"staging {shard.source}/{shard.name}: the copy reads back with {size} bytes and CRC "
            f"{found:08x}, written {shard.size_bytes} and {expected:08x}; is the disk failing?"
        )


class StagingArea:
    """One cache folder. `step` does the work, in one thread; `update` and `stop` in any."""

    def __init__(
        self,
        cache_dir: str,
        *,
        budget_bytes: int,
        store: ObjectStore | None = None,
        deadline_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises BlockingIOError when another process, or area, owns the folder."""
        self.cache_dir = cache_dir
        self.budget_bytes = budget_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        os.makedirs(cache_dir, exist_ok=True)
        self._lock_fd = _own(cache_dir)
        self._own_store: Store | None = None
        if store is None:
            store = self._own_store = Store()
        self._store: ObjectStore = store
        self._cached = scan(cache_dir)
        self._needs: tuple[Need, ...] = ()
        self._look = False
        self._stop = threading.Event()
        self._pause: dict[str, tuple[int, float]] = {}
        """Failures in a row of a shard, and when to try it again."""
        self._warned: set[str] = set()
        self.copied_bytes = 0
        self.evictions = 0
        self.errors = 0
        self.last_error = ""

    @property
    def cached_bytes(self) -> int:
        return sum(self._cached.copy().values())

    @property
    def cached_shards(self) -> int:
        return len(self._cached)

    def update(self, needs: Sequence[Need]) -> None:
        """Replace the list of needs; the next `step` goes by it."""
        self._needs = tuple(needs)
        self._look = True

    def step(self) -> bool:
        """Drop one copy or make one; False when there is nothing to do for now."""
        if self._look:  # a reader removes a copy that turned out damaged
            self._look = False
            for name in [n for n in self._cached if not self._has(n)]:
                del self._cached[name]
        decision = decide(self._needs, self._cached, self.budget_bytes)
        self._warn_too_large(decision.too_large)
        now = self._clock()
        used = self.cached_bytes
        for need in decision.copy:
            name = staged_name(need.shard)
            if self._pause.get(name, (0, now))[1] > now:
                continue
            if used + need.shard.size_bytes > self.budget_bytes:
                self._evict(decision.evict[0])
            else:
                self._copy(name, need)
            return True
        if used > self.budget_bytes and decision.evict:
            self._evict(decision.evict[0])
            return True
        return False

    def stop(self) -> None:
        """Make a copy in progress give up soon."""
        self._stop.set()

    def close(self) -> None:
        """Give the folder up; its copies stay for the next owner."""
        self.stop()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            if self._own_store is not None:
                self._own_store.close()

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.cache_dir, name))

    def _copy(self, name: str, need: Need) -> None:
        try:
            copy_shard(
                self._store,
                need.shard,
                need.crc32,
                self.cache_dir,
                deadline_s=self._deadline_s,
                stopped=self._stop.is_set,
            )
        except CopyStopped:
            return
        except (StorageError, StaleIndexError) as error:
            failures = self._pause.get(name, (0, 0.0))[0] + 1
            pause = min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LAST_PAUSE_S)
            self._pause[name] = failures, self._clock() + pause
            self.errors += 1
            cause = error.__cause__
            full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
            self.last_error = (
                f"the disk of {self.cache_dir} is full: {error}" if full else str(error)
            )
            _LOG.warning(
                "%s; tried again in %.3g s, read from its origin until then", self.last_error, pause
            )
            return
        self._pause.pop(name, None)
        self._cached[name] = need.shard.size_bytes
        self.copied_bytes += need.shard.size_bytes

    def _evict(self, name: str) -> None:
        path = os.path.join(self.cache_dir, name)
        if os.path.exists(path):
            os.unlink(path)
        del self._cached[name]
        self.evictions += 1

    def _warn_too_large(self, needs: Sequence[Need]) -> None:
        for need in needs:
            name = staged_name(need.shard)
            if name not in self._warned:
                self._warned.add(name)
                _LOG.warning(
                    "shard %s/%s has %d bytes, more than the budget of %s (%d): it is not staged, "
                    "but read from its origin",
                    need.shard.source,
                    need.shard.name,
                    need.shard.size_bytes,
                    self.cache_dir,
                    self.budget_bytes,
                )


def _own(cache_dir: str) -> int:
    fd = os.open(os.path.join(cache_dir, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BlockingIOError(
            errno.EWOULDBLOCK, "the cache directory belongs to another running stager", cache_dir
        ) from None
    return fd
