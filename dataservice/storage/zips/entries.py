"""Parses the entries of a central directory into columns, a few MiB of them at a time.

Invariants: all that is refused about a member without reading it is refused here; of members that
share bytes none is left. Less than 1 us an entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.errors import ArchiveError
from dataservice.storage import membertable as mt
from dataservice.storage.zips.layout import (
    ENCRYPTED_FLAGS,
    ENTRY,
    ENTRY_BYTES,
    entry_places,
    extra_field,
    unaligned,
)
from dataservice.storage.zips.methods import METHODS, STORED, crc32
from dataservice.storage.zips.names import read_names

_LOCAL_BYTES = 30
_UNKNOWN = 0xFFFFFFFF
_AES = 99
_UNIX, _REGULAR_FILE = 3, 8
_MAX_METHOD = 0x7FFF
"""Higher numbers are shown as this one."""
_ZIP64 = 0x0001
_FIELD_BYTES = 4
"""Kind and length of an extra field, before its data."""
_WIDE = ((_UNKNOWN, 8), (_UNKNOWN, 8), (_UNKNOWN, 8), (0xFFFF, 4))
"""What stands for "in the zip64 field" in size, stored bytes, offset and disk; width there."""
_SLACK = 64 * 1024
"""Stored bytes that a compressed member may have beyond its size and an eighth of it."""
_COLUMNS = {
    "offset": np.uint64,
    "stored_bytes": np.uint64,
    "size_bytes": np.uint64,
    "method": np.int16,
    "crc32": np.uint32,
    "problem": np.uint8,
    "stop": np.uint64,
    "placed": np.bool_,
}


class EntryParser:
    """Takes the directory in consecutive chunks, gives the table of all."""

    def __init__(self, *, shift: int, directory_at: int) -> None:
        self._shift = shift
        self._directory_at = directory_at
        self._rest = b""
        self._parts: list[dict[str, Any]] = []
        self._crc = 0
        self.num_entries = 0

    def feed(self, chunk: bytes) -> None:
        """Raises ArchiveError."""
        self._crc = crc32(chunk, self._crc)
        data = self._rest + chunk
        at, stop = entry_places(data)
        self._rest = data[stop:]
        self.num_entries += len(at)
        if self.num_entries > mt.MAX_MEMBERS:
            raise ArchiveError(
                f"{self.num_entries} members, over the limit of an archive ({mt.MAX_MEMBERS})"
            )
        if len(at):
            self._parts.append(self._columns(data, at))

    def finish(self) -> mt.MemberTable:
        """Raises ArchiveError."""
        if self._rest:
            raise ArchiveError("damaged: the central directory ends within an entry")
        columns = {
            name: np.concatenate([np.zeros(0, kind), *(part[name] for part in self._parts)])
            for name, kind in _COLUMNS.items()
        }
        names = pa.chunked_array([p["name"] for p in self._parts], pa.large_string())
        names = names.combine_chunks()
        problem, stop, placed = columns["problem"], columns.pop("stop"), columns.pop("placed")
        mt.refuse_shadowed(problem, names)
        mt.refuse_overlaps(problem, columns["offset"], stop, placed)
        return mt.MemberTable(name=names, directory_crc32=self._crc, **columns)

    def _columns(self, data: bytes, at: NDArray[np.int64]) -> dict[str, Any]:
        every = unaligned(data, ENTRY)
        last = at + ENTRY_BYTES + every["name"][at] - 1
        is_file = (every["name"][at] == 0) | (np.frombuffer(data, np.uint8)[last] != ord("/"))
        at = at[is_file]
        entry = every[at]
        names, problem = read_names(data, at, entry)
        size, stored, offset, disk = _wide_values(data, at, entry, problem)
        offset += np.uint64(self._shift)
        stop = offset + np.uint64(_LOCAL_BYTES) + stored
        placed = (stop > offset) & (stop <= self._directory_at) & (problem != mt.DAMAGED)
        _refuse(problem, entry, size, stored)
        mt.refuse(problem, disk != 0, mt.SPLIT)
        mt.refuse(problem, ~placed, mt.DAMAGED)
        return {
            "name": names,
            "offset": offset,
            "stored_bytes": stored,
            "size_bytes": size,
            "method": np.minimum(entry["method"], _MAX_METHOD).astype(np.int16),
            "crc32": entry["crc32"],
            "problem": problem,
            "stop": stop,
            "placed": placed & (disk == 0),
        }


def _refuse(
    problem: NDArray[np.uint8],
    entry: NDArray[Any],
    size: NDArray[np.uint64],
    stored: NDArray[np.uint64],
) -> None:
    flags, method = entry["flags"], entry["method"]
    kind = np.where(entry["made_by"] >> 8 == _UNIX, entry["external"] >> 28, 0)
    mt.refuse(problem, (flags & ENCRYPTED_FLAGS != 0) | (method == _AES), mt.ENCRYPTED)
    mt.refuse(problem, ~np.isin(method, list(METHODS)), mt.METHOD)
    mt.refuse(problem, (kind != 0) & (kind != _REGULAR_FILE), mt.NOT_A_FILE)
    mt.refuse(problem, size > mt.MAX_MEMBER_BYTES, mt.TOO_LARGE)
    mt.refuse(problem, stored > mt.MAX_MEMBER_BYTES + _SLACK, mt.TOO_LARGE)
    is_large = size > mt.RATIO_FROM_BYTES
    mt.refuse(problem, is_large & (size > mt.MAX_RATIO * stored), mt.RATIO)
    most = np.where(method == STORED, size, size + size // 8 + _SLACK)
    mt.refuse(problem, (stored > most) | ((method == STORED) & (stored < size)), mt.SIZES)


def _wide_values(
    data: bytes, at: NDArray[np.int64], entry: NDArray[Any], problem: NDArray[np.uint8]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Size, stored bytes, offset and disk, those of zip64 members from their extra field."""
    columns = [entry[name].astype(np.uint64) for name in ("size", "stored", "offset", "disk")]
    unknown = [column == limit for column, (limit, _) in zip(columns, _WIDE, strict=True)]
    rows = np.flatnonzero(np.logical_or.reduce(unknown))
    if not len(rows):
        return columns[0], columns[1], columns[2], columns[3]
    wide = [column[rows] for column in columns]
    begin, end = _zip64_fields(data, at[rows] + ENTRY_BYTES + entry["name"][rows], entry[rows])
    good = np.ones(len(rows), np.bool_)
    for values, is_unknown, (_, width) in zip(wide, unknown, _WIDE, strict=True):
        needed = is_unknown[rows]
        there = needed & (begin + width <= end)
        values[there] = unaligned(data, f"<u{width}")[begin[there]]
        good &= there | ~needed
        begin += needed * width
    refused = np.zeros(len(at), np.bool_)
    refused[rows[~good]] = True
    mt.refuse(problem, refused, mt.DAMAGED)
    for column, values in zip(columns, wide, strict=True):
        column[rows[good]] = values[good]
    return columns[0], columns[1], columns[2], columns[3]


def _zip64_fields(
    data: bytes, at: NDArray[np.int64], entry: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the data of the zip64 fields begins and ends, of entries whose extra fields stand at
    `at`; 0 and 0 where there is none."""
    size = entry["extra"].astype(np.int64)
    begin, end = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    some = np.flatnonzero(size >= _FIELD_BYTES)
    kind, length = (unaligned(data, "<u2")[at[some] + step].astype(np.int64) for step in (0, 2))
    whole = _FIELD_BYTES + length <= size[some]
    # Mostly it is the first field.
    first = some[(kind == _ZIP64) & whole]
    begin[first] = at[first] + _FIELD_BYTES
    end[first] = begin[first] + length[(kind == _ZIP64) & whole]
    for row in some[(kind != _ZIP64) & whole].tolist():
        field = extra_field(data, int(at[row]), int(size[row]), _ZIP64)
        begin[row], end[row] = field or (0, 0)
    return begin, end
