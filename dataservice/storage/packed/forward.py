"""Reads ranges of packed shards that are not staged, by unpacking them forward.

Invariants: right for any order of reads, fast for nearly ascending ones: a cursor keeps the last
4 MiB that it unpacked, 8 cursors are kept, and a read behind all of them unpacks the shard again
from its beginning (a warning names the shard once). Every call ends within its deadline and one
read of the origin; what was unpacked by then is not lost. A cursor holds 4 MiB, a record, and what
its decoder holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from dataservice.core.packspec import ShardRef
from dataservice.errors import RecordError, StorageTimeout
from dataservice.storage.forks import renew_in_children
from dataservice.storage.packed.unpacking import content_of

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 2 * 1024 * 1024
_KEPT_BYTES = 4 * 1024 * 1024
_MAX_CURSORS = 8

ReadOrigin = Callable[[ShardRef, int, int, float], bytes]
"""(shard, offset, size, deadline_s) -> exactly those bytes of the file as it is stored."""


class ForwardReader:
    """For threads; a forked child starts without cursors."""

    def __init__(self, read_origin: ReadOrigin) -> None:
        self._read_origin = read_origin
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Without cursors: a lock of one may be held by a thread that is not here."""
        self._lock = threading.Lock()
        self._cursors: deque[_Cursor] = deque(maxlen=_MAX_CURSORS)
        """The one used last at the right."""
        self._warned: set[str] = set()

    def read(self, shard: ShardRef, offset: int, size: int, *, deadline_s: float) -> bytes:
        """Exactly `size` bytes of the content.

        Raises what `read_origin` raises, RecordError where the file is damaged, StorageTimeout.
        """
        ends = time.monotonic() + deadline_s
        while True:
            cursor = self._cursor(shard, offset)
            if not cursor.lock.acquire(timeout=max(ends - time.monotonic(), 0)):
                raise StorageTimeout(
                    f"unpacking shard {shard.source}/{shard.name} to {offset}: other reads of it "
                    f"did not end within {deadline_s:.3g} s"
                )
            try:
                if cursor.start <= offset:
                    return cursor.read(offset, size, ends)
            except BaseException:
                if cursor.broken:
                    self._drop(cursor)
                raise
            finally:
                cursor.lock.release()

    def close(self) -> None:
        with self._lock:
            self._cursors.clear()

    def _cursor(self, shard: ShardRef, offset: int) -> _Cursor:
        """The one that needs to go on least, or a new one."""
        with self._lock:
            same = [cursor for cursor in self._cursors if cursor.shard == shard]
            usable = [cursor for cursor in same if cursor.start <= offset]
            if usable:
                cursor = max(usable, key=lambda cursor: cursor.position)
                self._cursors.remove(cursor)
            else:
                cursor = _Cursor(shard, self._read_origin)
                if same:
                    self._warn(shard, offset, max(same, key=lambda cursor: cursor.position))
            self._cursors.append(cursor)
        return cursor

    def _drop(self, cursor: _Cursor) -> None:
        with self._lock:
            if cursor in self._cursors:
                self._cursors.remove(cursor)

    def _warn(self, shard: ShardRef, offset: int, ahead: _Cursor) -> None:
        if shard.url not in self._warned:
            self._warned.add(shard.url)
            _LOG.warning(
                "shard %s/%s (%d bytes, %d unpacked) has no staged copy and is not read in order: "
                "unpacked again from its beginning for the record at %d, after one at %d; "
                "reads of it are slow until it is staged",
                shard.source,
                shard.name,
                shard.size_bytes,
                shard.content_bytes,
                offset,
                ahead.position,
            )


class _Cursor:
    def __init__(self, shard: ShardRef, read_origin: ReadOrigin) -> None:
        self.shard = shard
        self.lock = threading.Lock()
        self.start = 0
        """Of what is kept."""
        self.position = 0
        """Up to where it is unpacked."""
        self.broken = False
        """The unpacking ended with an error and cannot go on."""
        self._read_origin = read_origin
        self._ends = 0.0
        self._kept: deque[bytes] = deque()
        self._blocks = content_of(shard, self._chunks())

    def read(self, offset: int, size: int, ends: float) -> bytes:
        """From `start` on. `ends` is the deadline, by the monotonic clock."""
        self._ends = ends
        while self.position < offset + size:
            if time.monotonic() >= ends:
                raise StorageTimeout(
                    f"shard {self.shard.source}/{self.shard.name} is unpacked up to "
                    f"{self.position}, not yet to {offset + size}; the next try goes on there"
                )
            self._advance(offset)
        data = b"".join(self._kept)
        return data[offset - self.start : offset - self.start + size]

    def _advance(self, wanted: int) -> None:
        try:
            block = next(self._blocks)
        except RecordError as error:
            self.broken = True
            raise RecordError(
                error.reason, source=self.shard.source, shard=self.shard.name
            ) from error
        except BaseException:
            self.broken = True
            raise
        self._kept.append(block)
        self.position += len(block)
        while self.position - self.start - len(self._kept[0]) >= _KEPT_BYTES and (
            self.start + len(self._kept[0]) <= wanted
        ):
            self.start += len(self._kept.popleft())

    def _chunks(self) -> Iterator[bytes]:
        size_bytes = self.shard.size_bytes
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, size_bytes - offset)
            yield self._read_origin(
                self.shard, offset, size, max(self._ends - time.monotonic(), 0.001)
            )
