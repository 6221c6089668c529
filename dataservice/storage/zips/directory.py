"""Finds and reads the central directory of a zip archive (PKWARE APPNOTE 6.3.10).

Invariants: only the end of the archive and the directory are read, the directory in chunks of
4 MiB; a directory that is not where the end record says, or does not end where it says, is an
ArchiveError. Archives with bytes before them are read with their offsets moved by as many.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dataservice.errors import ArchiveError
from dataservice.storage.membertable import MAX_MEMBERS, MemberTable
from dataservice.storage.reads import ReadAt
from dataservice.storage.zips.entries import EntryParser
from dataservice.storage.zips.layout import ENTRY_BYTES, ENTRY_SIGNATURE

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_TAIL_BYTES = 128 * 1024
"""Read at once: longer than any comment, and the whole directory of a small archive."""
_CHUNK_BYTES = 4 * 1024 * 1024
_MAX_ENDS = 64
"""End records that are looked at."""
_SPLIT = "part of a split archive; join its parts first"


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    at: int
    """Where the directory should end."""
    offset: int
    """Of the directory, as the end record says."""
    size: int
    count: int
    is_zip64: bool
    trailing: int
    """Bytes behind the archive."""


def read_directory(read: ReadAt, size_bytes: int) -> MemberTable:
    """The member table of an archive of `size_bytes` bytes. Raises ArchiveError."""
    tail_at = max(size_bytes - _TAIL_BYTES, 0)
    tail = _Tail(read, tail_at, read(tail_at, size_bytes - tail_at))
    end, start = _find_directory(tail, size_bytes)
    parser = EntryParser(shift=start - end.offset, directory_at=start)
    for chunk in _chunks(tail, start, end.size):
        parser.feed(chunk)
    table = parser.finish()
    # Archives of over 65,535 members without zip64 exist: the count is cut to 16 bits.
    if parser.num_entries != end.count and (
        end.is_zip64 or parser.num_entries % 0x10000 != end.count
    ):
        raise ArchiveError(
            f"damaged: {parser.num_entries} entries in the central directory, "
            f"the end record says {end.count}"
        )
    return table


class _Tail:
    """Reads, from the end of the archive that is already there where it can."""

    def __init__(self, read: ReadAt, at: int, data: bytes) -> None:
        self._read = read
        self.at = at
        self.data = data

    def __call__(self, offset: int, size: int) -> bytes:
        if offset >= self.at:
            return self.data[offset - self.at : offset - self.at + size]
        return self._read(offset, size)


def _chunks(read: ReadAt, start: int, size: int) -> Iterator[bytes]:
    for at in range(0, size, _CHUNK_BYTES):
        yield read(start + at, min(_CHUNK_BYTES, size - at))


def _find_directory(tail: _Tail, size_bytes: int) -> tuple[_End, int]:
    """The end record and where its directory starts.

    The last end record counts; one before it only where that one's comment holds the later ones.
    """
    first: ArchiveError | None = None
    for at, trailing in islice(_end_records(tail), _MAX_ENDS):
        if first and trailing:
            continue
        try:
            end = _read_end(tail, at, trailing)
            return end, _directory_start(tail, end)
        except ArchiveError as error:
            first = first or error
    if first:
        raise first
    if size_bytes >= 4 and tail(0, 4) in (b"PK\x07\x08", b"PK\x03\x04"):
        raise ArchiveError(
            "truncated, or a part of a split archive but the last: no central directory found"
        )
    raise ArchiveError("truncated, or not a zip archive: no central directory found")


def _end_records(tail: _Tail) -> Iterator[tuple[int, int]]:
    """Where each may stand in the tail, the last first, and how many bytes are behind it."""
    at = len(tail.data)
    while (at := tail.data.rfind(b"PK\x05\x06", 0, at)) >= 0:
        if at + _END.size <= len(tail.data):
            comment_bytes = _END.unpack_from(tail.data, at)[7]
            trailing = len(tail.data) - at - _END.size - comment_bytes
            if trailing >= 0:
                yield at, trailing


def _read_end(tail: _Tail, at: int, trailing: int) -> _End:
    _, disk, directory_disk, count_here, count, size, offset, _ = _END.unpack_from(tail.data, at)
    end = tail.at + at
    locator_at = at - _END64_LOCATOR.size
    is_zip64 = locator_at >= 0 and tail.data.startswith(b"PK\x06\x07", locator_at)
    if is_zip64:
        _, disk64, end64, disks = _END64_LOCATOR.unpack_from(tail.data, locator_at)
        if disk64 or disks > 1:
            raise ArchiveError(_SPLIT)
        end, record = _read_end64(tail, tail.at + locator_at, end64)
        _, _, _, _, disk, directory_disk, count_here, count, size, offset = record
    if disk or directory_disk or count_here != count:
        raise ArchiveError(_SPLIT)
    if count > MAX_MEMBERS or size > MAX_MEMBERS * 2 * ENTRY_BYTES:
        raise ArchiveError(f"{count} members, over the limit of an archive ({MAX_MEMBERS})")
    return _End(at=end, offset=offset, size=size, count=count, is_zip64=is_zip64, trailing=trailing)


def _read_end64(read: ReadAt, locator: int, claimed: int) -> tuple[int, tuple[int, ...]]:
    """The zip64 end record, normally right before its locator, whatever precedes the archive."""
    for at in (locator - _END64.size, claimed):
        if 0 <= at <= locator - _END64.size:
            record = _END64.unpack(read(at, _END64.size))
            if record[0] == b"PK\x06\x06":
                return at, record
    raise ArchiveError("truncated or damaged: no zip64 end record")


def _directory_start(read: ReadAt, end: _End) -> int:
    """Where the directory starts: right before the end record, or where that one says."""
    before_end = end.at - end.size
    if before_end >= end.offset and _is_directory(read, before_end, end):
        shift = before_end - end.offset
        if shift and end.trailing:
            # The end record of an archive stored within one that is cut off looks like this.
            raise ArchiveError("truncated: what follows its last central directory is no archive")
        if shift and not shift % (1 << 32) and not end.is_zip64:
            raise ArchiveError(
                "over 4 GiB, but its offsets have 32 bits; pack it anew with a tool that has zip64"
            )
        return before_end
    if end.offset + end.size <= end.at and _is_directory(read, end.offset, end):
        return end.offset
    raise ArchiveError("truncated or damaged: the central directory is not where it should be")


def _is_directory(read: ReadAt, at: int, end: _End) -> bool:
    return not end.count or (
        end.size >= ENTRY_BYTES and read(at, len(ENTRY_SIGNATURE)) == ENTRY_SIGNATURE
    )
