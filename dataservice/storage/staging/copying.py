"""Copies one shard into an open file: all of it as it is, or the content of a packed one.

Invariants: the file is the shard's content only if `copy_into` returns: of the right size, read
from an origin that is what the index saw before and after, with the CRC that the index knows where
it knows one, and on disk. What later reads of a copy do not check again is read back from the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from isal.isal_zlib import crc32, crc32_combine

from dataservice.core.packspec import ShardRef
from dataservice.errors import RecordError, StaleIndexError, StorageError
from dataservice.storage.recordfiles import content_of
from dataservice.storage.staging.needs import Need
from dataservice.storage.staging.ranges import RANGE_BYTES, Ranges

_PACKED_WINDOW = 4
"""Ranges ahead of the decompressor, which takes them in order."""
_WRITE_BYTES = 256 * 1024
"""At once: for larger writes Linux looks for runs of free memory, which can be slow to find."""

OnRange = Callable[[int, int], None]


def copy_into(fd: int, need: Need, ranges: Ranges, *, window: int, on_range: OnRange) -> None:
    """Write the shard into the file, and wait until the disk has it.

    Raises StaleIndexError when the origin is not what the index saw, StorageError when it fails,
    OSError when the disk does (ENOSPC), CopyStopped.
    """
    shard = need.shard
    _check_origin(ranges, shard)
    if shard.packing not in ("", "parquet"):
        stored, written = _unpack(fd, shard, ranges, window, on_range)
    else:
        stored = written = _copy(fd, shard, ranges, window, on_range)
    _check_origin(ranges, shard)
    # that of a Parquet file in the index is of its footer
    if shard.packing != "parquet" and need.crc32 not in (-1, stored):
        raise StaleIndexError(
            f"{_name(shard)} has CRC {stored:08x}, {need.crc32:08x} when it was indexed; run "
            "`dataservice index` again"
        )
    os.fsync(fd)
    if not checked_later(need):
        _read_back(fd, shard, written)


def checked_later(need: Need) -> bool:
    """Whether every read of the copy is checked: records have a CRC in the index, members of a zip
    one in the zip. Files of a folder, tars and rows of Parquet have none, and records of a packed
    file may be counted from the copy."""
    shard = need.shard
    if shard.packing:
        return False
    return need.crc32 >= 0 or shard.name.lower().endswith(".zip")


def _copy(fd: int, shard: ShardRef, ranges: Ranges, window: int, on_range: OnRange) -> int:
    """The CRC-32 of what was written."""
    size = shard.size_bytes
    parts = [(0, 0)] * -(-size // RANGE_BYTES)
    for number, data in ranges.fetched(
        shard.url, size, window=window, in_order=False, on_range=on_range
    ):
        _write(fd, data, number * RANGE_BYTES)
        parts[number] = crc32(data), len(data)
    found = 0
    for part, length in parts:
        found = crc32_combine(found, part, length)
    return found


def _unpack(
    fd: int, shard: ShardRef, ranges: Ranges, window: int, on_range: OnRange
) -> tuple[int, int]:
    """The CRC-32 of the packed file and of what was written.

    What stands behind the content that the index used, such as a damaged end, is not unpacked.
    """
    stored = 0

    def chunks() -> Iterator[bytes]:
        nonlocal stored
        for _, data in ranges.fetched(
            shard.url,
            shard.size_bytes,
            window=min(window, _PACKED_WINDOW),
            in_order=True,
            on_range=on_range,
        ):
            stored = crc32(data, stored)
            yield data

    packed = chunks()
    size = written = 0
    try:
        for data in content_of(shard, packed):
            _write(fd, data, size)
            written = crc32(data, written)
            size += len(data)
    except RecordError as error:
        raise StaleIndexError(
            f"{_name(shard)} does not unpack as it did when it was indexed: {error.reason}; run "
            "`dataservice index` again"
        ) from error
    for _ in packed:
        pass
    return stored, written


def _check_origin(ranges: Ranges, shard: ShardRef) -> None:
    stat = ranges.stat(shard.url)
    same_time = not (shard.mtime_ns and stat.mtime_ns) or stat.mtime_ns == shard.mtime_ns
    if stat.size_bytes != shard.size_bytes or not same_time:
        raise StaleIndexError(
            f"{_name(shard)} changed after it was indexed; run `dataservice index` again"
        )


def _write(fd: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left[:_WRITE_BYTES], offset)
        left, offset = left[done:], offset + done


def _read_back(fd: int, shard: ShardRef, expected: int) -> None:
    """From the disk itself, not from memory."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found = size = 0
    while data := os.pread(fd, RANGE_BYTES, size):
        found = crc32(data, found)
        size += len(data)
    if size != shard.content_bytes or found != expected:
        raise StorageError(
            f"staging {_name(shard)}: the copy reads back with {size} bytes and CRC {found:08x}, "
            f"written {shard.content_bytes} and {expected:08x}; is the disk failing?"
        )


def _name(shard: ShardRef) -> str:
    return f"shard {shard.source}/{shard.name}"
