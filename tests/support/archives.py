"""Reads archives that stand in memory."""

from __future__ import annotations

from dataservice.errors import ArchiveError
from dataservice.storage.membertable import MemberTable
from dataservice.storage.zips import Place, read_directory, read_place


class Source:
    """Ranges of bytes; counts the reads, and refuses one that goes past the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    def __call__(self, offset: int, size: int) -> bytes:
        assert 0 <= offset and 0 <= size and offset + size <= len(self.data)
        self.reads.append((offset, size))
        return self.data[offset : offset + size]

    @property
    def read_bytes(self) -> int:
        return sum(size for _, size in self.reads)


def directory(data: bytes) -> MemberTable:
    return read_directory(Source(data), len(data))


def place(table: MemberTable, row: int) -> Place:
    return Place(*(getattr(table, name)[row].item() for name in Place._fields))


def names(table: MemberTable) -> list[str]:
    found: list[str] = table.name.to_pylist()
    return found


def contents(data: bytes) -> dict[str, bytes | str]:
    """What every member holds, or why it cannot be read; of a name the last member."""
    table = directory(data)
    found: dict[str, bytes | str] = {}
    for row, name in enumerate(names(table)):
        reason = table.reason(row)
        if reason is None:
            try:
                found[name] = read_place(Source(data), place(table, row), len(data))
            except ArchiveError as error:
                found[name] = error.reason
        else:
            found[name] = reason
    return found
