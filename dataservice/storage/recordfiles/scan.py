"""All records of one record file in order, with their bytes or by their places alone.

Invariants: both ways give the same rows, also for files that are damaged or cut off: what cannot be
read is one row of length 0 with the reason, the last one. Places count in the unpacked content and
[offset, offset + length) are exactly the record's bytes. Memory holds a few MiB, the records of a
batch (at most about 16 MiB and one record) and never a record above the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.storage.jsonl import MAX_LINE_BYTES, Line
from dataservice.storage.objects import ObjectStore
from dataservice.storage.packed.unpacking import packing_of
from dataservice.storage.recordfiles.content import Content
from dataservice.storage.recordfiles.finders import Found
from dataservice.storage.recordfiles.heads import HEAD_BYTES, finder_for
from dataservice.storage.recordfiles.rows import RowScan

_BATCH_BYTES = 16 * 1024 * 1024
_LARGEST_LENGTH = 2**32 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """The places of n records."""

    offset: NDArray[np.uint64]
    length: NDArray[np.uint32]
    """A longer one counts as 2^32 - 1."""
    crc32: int
    """Of the file's stored bytes."""
    unpacked_bytes: int
    unread: str
    """As of a `RecordScan`."""


class RecordScan:
    """`batches` once; `crc32`, `unpacked_bytes` and `unread` hold after its end."""

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        size_bytes: int,
        *,
        deadline_s: float,
        max_record_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._url = url
        self._limit = limit = max_record_bytes
        self._content: Content | RowScan
        if packing_of(url) == "parquet":
            self._content = RowScan(store, url, size_bytes, deadline_s=deadline_s, limit=limit)
        else:
            self._content = Content(store, url, size_bytes, deadline_s=deadline_s)

    @property
    def crc32(self) -> int:
        """Of the file's stored bytes."""
        return self._content.crc32

    @property
    def unpacked_bytes(self) -> int:
        return self._content.size_bytes

    @property
    def unread(self) -> str:
        """What of the file is lost and why, for a person: also the reason of the last record. Empty
        where all was read."""
        return self._content.unread

    def batches(self, num: int = 256) -> Iterator[list[Line]]:
        """At most `num` records each. Raises StorageError and FileNotFoundError."""
        batch: list[Line] = []
        batch_bytes = 0
        for line in self._lines():
            batch.append(line)
            batch_bytes += len(line.data or b"")
            if len(batch) == num or batch_bytes >= _BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        if batch:
            yield batch

    def _lines(self) -> Iterator[Line]:
        content = self._content
        if isinstance(content, RowScan):
            yield from content.lines()
            return
        finder = finder_for(self._url)
        held = _Held(self._limit)
        for block in content.blocks():
            yield from held.lines(finder.feed(block), block)
            held.keep(block, finder.open_start)
        found, problem = content.end(finder)
        yield from held.lines(found, b"")
        if problem:
            yield Line(problem.number, problem.offset, 0, None, problem.reason)


class _Held:
    """The content since the start of the record that is open, as far as it may be wanted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._most = max(limit, HEAD_BYTES)
        self._position = 0  # of the next block
        self._parts: list[bytes] = []
        self._start = 0  # of the parts
        self._size = 0

    def lines(self, found: Found, block: bytes) -> Iterator[Line]:
        """The records found with the block; the first ones may begin before it."""
        position, limit = self._position, self._limit
        before = b""
        if num_before := int(np.searchsorted(found.starts, position)):
            part = max(int(found.stops[num_before - 1]) - position, 0)
            if int((found.stops - found.starts)[:num_before].min()) <= limit:
                before = b"".join((*self._parts, block[:part]))
        rows = zip(found.numbers.tolist(), found.starts.tolist(), found.stops.tolist(), strict=True)
        for number, start, stop in rows:
            length = stop - start
            if length > limit:
                reason = f"the record has {length} bytes, more than the limit of {limit}"
                yield Line(number, start, min(length, _LARGEST_LENGTH), None, reason)
            elif start >= position:
                yield Line(number, start, length, block[start - position : stop - position])
            else:
                data = before[start - self._start : stop - self._start]
                yield Line(number, start, length, data)

    def keep(self, block: bytes, open_start: int) -> None:
        if open_start >= self._position:
            self._parts = [block[open_start - self._position :]]
            self._start = open_start
        elif self._size > self._most:
            self._parts.clear()  # the open record is above the limit; `_size` says so
            self._position += len(block)
            return
        else:
            self._parts.append(block)
            if open_start > self._start:
                self._parts = [b"".join(self._parts)[open_start - self._start :]]
                self._start = open_start
        self._size = sum(map(len, self._parts))
        self._position += len(block)


def scan_offsets(store: ObjectStore, url: str, size_bytes: int, *, deadline_s: float) -> Offsets:
    """The rows of a `RecordScan` without their bytes. Raises as it does."""
    if packing_of(url) == "parquet":
        return _row_offsets(RecordScan(store, url, size_bytes, deadline_s=deadline_s))
    finder = finder_for(url)
    content = Content(store, url, size_bytes, deadline_s=deadline_s)
    starts: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for block in content.blocks():
        found = finder.feed(block)
        starts.append(found.starts)
        lengths.append(found.stops - found.starts)
    found, problem = content.end(finder)
    starts.append(found.starts)
    lengths.append(found.stops - found.starts)
    if problem:
        starts.append(np.array([problem.offset]))
        lengths.append(np.array([0]))
    return Offsets(
        offset=np.concatenate(starts).astype(np.uint64),
        length=np.minimum(np.concatenate(lengths), _LARGEST_LENGTH).astype(np.uint32),
        crc32=content.crc32,
        unpacked_bytes=content.size_bytes,
        unread=content.unread,
    )


def count_records(store: ObjectStore, url: str, size_bytes: int, *, deadline_s: float) -> int:
    """How many rows a `RecordScan` has; holds none of them. Raises as it does."""
    if packing_of(url) == "parquet":
        return sum(map(len, RecordScan(store, url, size_bytes, deadline_s=deadline_s).batches()))
    finder = finder_for(url)
    content = Content(store, url, size_bytes, deadline_s=deadline_s)
    count = sum(len(finder.feed(block).starts) for block in content.blocks())
    found, problem = content.end(finder)
    return count + len(found.starts) + (problem is not None)


def _row_offsets(scan: RecordScan) -> Offsets:
    lengths = [line.length for batch in scan.batches() for line in batch]
    return Offsets(
        offset=np.arange(len(lengths), dtype=np.uint64),
        length=np.minimum(np.array(lengths, np.int64), _LARGEST_LENGTH).astype(np.uint32),
        crc32=scan.crc32,
        unpacked_bytes=scan.unpacked_bytes,
        unread=scan.unread,
    )
