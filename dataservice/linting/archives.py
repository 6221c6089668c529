"""Reads every member of a zip or tar as a served run would, and says what is wrong with each.

Invariants: one member is held at a time; a bad member is a finding and the others are read; nothing
is written or unpacked to disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from dataservice.errors import ArchiveError, StorageError
from dataservice.linting.findings import Finding
from dataservice.storage import tars, zips
from dataservice.storage.membertable import AS_IT_IS, MemberTable
from dataservice.storage.reads import ReadAt

_AHEAD_BYTES = 64 * 1024


def lint_archive(
    file: str, kind: Literal["zip", "tar"], read: ReadAt, size_bytes: int, *, digest: bool
) -> Iterator[Finding]:
    """One finding for the archive, then one a member."""
    try:
        table = _read_table(kind, read, size_bytes)
    except (ArchiveError, StorageError) as error:
        why = error.reason if isinstance(error, ArchiveError) else str(error)
        yield Finding(file=file, kind=kind, reason=why, size=size_bytes)
        return
    yield Finding(file=file, kind=kind, reason=None, size=size_bytes)
    read = _Ahead(read, size_bytes)
    for row in range(len(table)):
        reason = table.reason(row)
        sha256: str | None = None
        if reason is None:
            try:
                data = _member(table, row, read, size_bytes)
                sha256 = hashlib.sha256(data).hexdigest() if digest else None
            except ArchiveError as error:
                reason = error.reason
            except StorageError as error:
                reason = f"could not be read: {error}"
        yield Finding(
            file=file,
            kind=kind,
            member=table.name[row].as_py(),
            reason=reason,
            size=int(table.size_bytes[row]),
            sha256=sha256,
        )


class _Ahead:
    """Small members mostly stand behind each other: reads some of them at once."""

    def __init__(self, read: ReadAt, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._at = 0
        self._data = b""

    def __call__(self, offset: int, size: int) -> bytes:
        start = offset - self._at
        if start < 0 or start + size > len(self._data):
            if size >= _AHEAD_BYTES:
                return self._read(offset, size)
            self._data = self._read(offset, max(min(_AHEAD_BYTES, self._size_bytes - offset), size))
            self._at, start = offset, 0
        return self._data[start : start + size]


def _read_table(kind: Literal["zip", "tar"], read: ReadAt, size_bytes: int) -> MemberTable:
    """Raises ArchiveError, StorageError."""
    if not size_bytes:
        raise ArchiveError("empty: the file has no bytes")
    return (zips.read_directory if kind == "zip" else tars.read_members)(read, size_bytes)


def _member(table: MemberTable, row: int, read: ReadAt, archive_bytes: int) -> bytes:
    """The checked bytes of a member. Raises ArchiveError, StorageError."""
    method, offset, stored_bytes, size_bytes, crc32 = (
        int(column[row])
        for column in (
            table.method,
            table.offset,
            table.stored_bytes,
            table.size_bytes,
            table.crc32,
        )
    )
    if method == AS_IT_IS:
        return read(offset, size_bytes)
    place = zips.Place(method, offset, stored_bytes, size_bytes, crc32)
    return zips.read_place(read, place, archive_bytes)
