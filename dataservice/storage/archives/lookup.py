"""Finds members of several archives by name: one table of hashes, sorted, searched for many names
at once.

Invariants: names are compared by 96 bits of their hash, never read; the first archive that has a
name counts, and in an archive the last such member that is not shadowed. 20 bytes a member, in
memory or in a mapped file that processes share; a file is written in bounded memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataservice.storage.archives.names import plain_names
from dataservice.storage.membertable import SHADOWED

Ints = NDArray[np.int64]

_FIELDS = (("hash", "<u8"), ("check", "<u4"), ("archive", "<u4"), ("member", "<u4"))
_PART_MEMBERS = 1 << 22
_SLICE = 1 << 16


class Named(Protocol):
    """An archive's names and problems by row."""

    @property
    def num_members(self) -> int: ...

    def named(self) -> Iterable[str]: ...

    def problems(self) -> Ints: ...


class Lookup:
    """`find` answers (archive, member), archives counted from 0 in the order given."""

    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self._hash = columns["hash"]
        self._check = columns["check"]
        self._archive = columns["archive"]
        self._member = columns["member"]

    @classmethod
    def of(cls, archives: Sequence[Named]) -> Lookup:
        """In memory; for many members `write_lookup` and `open` are better."""
        columns = [_unsorted(number, archive) for number, archive in enumerate(archives)]
        joined = {
            name: np.concatenate([np.zeros(0, kind), *(part[name] for part in columns)])
            for name, kind in _FIELDS
        }
        order = np.argsort(joined["hash"], kind="stable")
        return cls({name: values[order] for name, values in joined.items()})

    @classmethod
    def open(cls, path: str) -> Lookup:
        rows = os.path.getsize(path) // 20
        return cls(_columns(path, rows, "r") if rows else _no_columns())

    def find(self, names: Sequence[str]) -> tuple[Ints, Ints]:
        """Archive and member of each name, -1 where no archive has it; the names are as
        `searched_names` gives them."""
        hashes, checks = _hashes(_digests(names))
        archive = np.full(len(names), -1, dtype=np.int64)
        member = archive.copy()
        if len(self._hash) and len(names):
            at = np.minimum(np.searchsorted(self._hash, hashes), len(self._hash) - 1)
            same = (self._hash[at] == hashes) & (self._check[at] == checks)
            archive[same] = self._archive[at[same]]
            member[same] = self._member[at[same]]
        return archive, member

    def find_in(self, name: str, archive: int) -> int:
        """The member of that name in one of the archives, -1 when it has none."""
        (wanted,), (check,) = _hashes(_digests([name]))
        first = int(np.searchsorted(self._hash, wanted))
        for at in range(first, len(self._hash)):
            if self._hash[at] != wanted:
                break
            if self._archive[at] == archive and self._check[at] == check:
                return int(self._member[at])
        return -1


def write_lookup(path: str, archives: Sequence[Named]) -> None:
    """A file for `Lookup.open`. Goes through all members once, then sorts part by part."""
    rows = sum(archive.num_members for archive in archives)
    unsorted = path + ".unsorted"
    if not rows:
        open(path, "wb").close()
        return
    try:
        _allocate(unsorted, rows)
        columns = _columns(unsorted, rows, "r+")
        filled = 0
        for number, archive in enumerate(archives):
            part = _unsorted(number, archive)
            for name, values in part.items():
                columns[name][filled : filled + len(values)] = values
            filled += len(part["hash"])
        _write_sorted(path, {name: values[:filled] for name, values in columns.items()})
    finally:
        os.unlink(unsorted)


def _write_sorted(path: str, unsorted: dict[str, NDArray[Any]]) -> None:
    rows = len(unsorted["hash"])
    _allocate(path, rows)
    columns = _columns(path, rows, "r+")
    parts = -(-rows // _PART_MEMBERS)
    begin = 0
    for part in range(parts):
        low, high = ((number << 24) // parts for number in (part, part + 1))
        chosen = _between(unsorted["hash"], low, high)
        order = chosen[np.argsort(unsorted["hash"][chosen], kind="stable")]
        for name, values in unsorted.items():
            columns[name][begin : begin + len(order)] = values[order]
        begin += len(order)


def _between(hashes: NDArray[np.uint64], low: int, high: int) -> Ints:
    """Rows of the hashes whose first 24 bits are in [low, high)."""
    found = [np.zeros(0, dtype=np.int64)]
    for start in range(0, len(hashes), _PART_MEMBERS):
        first = hashes[start : start + _PART_MEMBERS] >> np.uint64(40)
        found.append(np.flatnonzero((first >= low) & (first < high)) + start)
    return np.concatenate(found)


def _unsorted(number: int, archive: Named) -> dict[str, NDArray[Any]]:
    rest = iter(archive.named())
    slices = iter(lambda: list(islice(rest, _SLICE)), [])
    hashes, checks = _hashes(b"".join([_digests(plain_names(names)) for names in slices]))
    kept = np.flatnonzero(archive.problems() != SHADOWED)[::-1]
    return {
        "hash": hashes[kept],
        "check": checks[kept],
        "archive": np.full(len(kept), number, dtype=np.uint32),
        "member": kept.astype(np.uint32),
    }


def _digests(names: Iterable[str]) -> bytes:
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(name.encode()) for name in names])


def _hashes(digests: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    words = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    return words[:, 0].copy(), words[:, 1].astype(np.uint32)


def _allocate(path: str, rows: int) -> None:
    """On a full disk this fails; writing to the map of a file with holes would end the process."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, rows * 20)


def _columns(path: str, rows: int, mode: Literal["r", "r+"]) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {}
    at = 0
    for name, kind in _FIELDS:
        columns[name] = np.memmap(path, dtype=kind, mode=mode, offset=at, shape=(rows,))
        at += rows * np.dtype(kind).itemsize
    return columns


def _no_columns() -> dict[str, NDArray[Any]]:
    return {name: np.zeros(0, kind) for name, kind in _FIELDS}
