"""A zip or tar whose members records name: its member table, and the picture sizes found so far.

Invariants: the directory of one version of an archive is read once and kept beside the index; of a
picture only headers are read, once a build; a member that is refused says why.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ArchiveError, DataError, StaleIndexError
from dataservice.storage import tars, zips
from dataservice.storage.archives.access import Access
from dataservice.storage.archives.name_blocks import NameBlocks, NameWriter
from dataservice.storage.index_folder import name_by_digest
from dataservice.storage.listing import FoundFile
from dataservice.storage.manifest import INDEX_VERSION, ArchiveEntry, TableFile
from dataservice.storage.members import probe_place
from dataservice.storage.membertable import MemberTable, describe_problem
from dataservice.storage.objects import Store
from dataservice.storage.tables import MEMBERS, Column, Line, Stored, Table, write_table

Ints = NDArray[np.int64]
Size = tuple[int, int]

ARCHIVE_PREFIX = "archive-"
_KEPT_FAILURES = 10_000
_NAMES_AT_ONCE = 4096


def archive_key(file: FoundFile) -> str:
    """Names the index files of one version of an archive."""
    text = f"{INDEX_VERSION}\0{file.url}\0{file.stat.size_bytes}\0{file.stat.mtime_ns}"
    return name_by_digest(ARCHIVE_PREFIX, text)


class Archive:
    """Raises ArchiveError when it is bad as a whole, StorageError when it cannot be read for now.

    With no `index_dir` nothing is written and its directory is held in memory.
    """

    def __init__(
        self, file: FoundFile, store: Store, index_dir: str | None, *, deadline_s: float
    ) -> None:
        self.file = file
        self.kind = "tar" if file.url.lower().endswith(".tar") else "zip"
        self.key = archive_key(file)
        self._store = store
        self._index_dir = index_dir
        self._deadline_s = deadline_s
        if index_dir is None or not self._load(index_dir):
            found = self._read_directory()
            if index_dir is None:
                self._hold(found)
            else:
                self._keep(index_dir, found)
                self._load(index_dir)
        self.is_whole = self.columns["problem"] == Line(base=0, step=0)
        self._sizes: NDArray[np.uint16] | None = None
        self._failed: dict[int, DataError] = {}

    columns: dict[str, Column]
    """MEMBERS by name."""
    names: Any
    """The members' names by row."""
    num_members: int
    directory_crc32: int

    def named(self) -> Iterable[str]:
        return self.names if isinstance(self.names, NameBlocks) else self.names.to_pylist()

    def name(self, member: int) -> str:
        name = self.names[member]
        return str(name if isinstance(name, str) else name.as_py())

    def problems(self) -> Ints:
        return self.columns["problem"].slice(0, self.num_members)

    def problem(self, member: int) -> ArchiveError | None:
        """Why a member cannot be read."""
        if self.is_whole:
            return None
        code = self.columns["problem"].item(member)
        if not code:
            return None
        method, size = (self.columns[name].item(member) for name in ("method", "size_bytes"))
        reason = describe_problem(code, method, size)
        return ArchiveError(f"{reason} (in {self._shown})")

    def known_sizes(self, members: Sequence[int]) -> list[Size | DataError | None]:
        """Of pictures that were looked at."""
        if self._sizes is None:
            return [None] * len(members)
        sizes = self._sizes[np.array(members, dtype=np.int64)].tolist()
        return [
            (width, height) if width else self._failed.get(member)
            for member, (width, height) in zip(members, sizes, strict=True)
        ]

    def learn_sizes(self, members: Ints, width: Ints, height: Ints) -> None:
        """Of pictures that an earlier build looked at."""
        sizes = self._all_sizes()
        sizes[members, 0] = width
        sizes[members, 1] = height

    def places(self, members: Sequence[int]) -> list[zips.Place]:
        rows = np.array(members, dtype=np.int64)
        columns = [self.columns[name].take(rows).tolist() for name in zips.Place._fields]
        return [zips.Place(*values) for values in zip(*columns, strict=True)]

    def probe(self, access: Access, member: int, place: zips.Place) -> Size | DataError:
        """The upright width and height of the picture at its place, by its header. Raises
        StorageError."""
        problem = self.problem(member)
        if problem is not None:
            return problem
        try:
            header = probe_place(
                lambda offset, size: self._part(access, offset, size),
                place,
                self.file.stat.size_bytes,
            )
        except DataError as error:
            failed = type(error)(f"{error.reason} (in {self._shown})")
            if len(self._failed) >= _KEPT_FAILURES:
                self._failed.clear()
            self._failed[member] = failed
            self._all_sizes()
            return failed
        sizes = self._all_sizes()
        sizes[member, 0], sizes[member, 1] = header.width, header.height
        return header.width, header.height

    @property
    def entry(self) -> ArchiveEntry:
        assert self._index_dir is not None
        files = [f"{self.key}.{what}.arrow" for what in ("members", "names")]
        members, names = (
            TableFile(name=name, size_bytes=os.path.getsize(os.path.join(self._index_dir, name)))
            for name in files
        )
        return ArchiveEntry(
            kind=self.kind,
            url=self.file.url,
            size_bytes=self.file.stat.size_bytes,
            mtime_ns=self.file.stat.mtime_ns,
            num_members=self.num_members,
            directory_crc32=self.directory_crc32,
            members=members,
            names=names,
        )

    @property
    def _shown(self) -> str:
        return self.file.url.rsplit("/", 1)[-1]

    def _all_sizes(self) -> NDArray[np.uint16]:
        if self._sizes is None:
            # Anonymous memory: only the pages of members that are used are ever there.
            memory = mmap.mmap(-1, max(4 * self.num_members, 1))
            self._sizes = np.frombuffer(memory, np.uint16, 2 * self.num_members).reshape(-1, 2)
        return self._sizes

    def _read_directory(self) -> MemberTable:
        read = tars.read_members if self.kind == "tar" else zips.read_directory
        return read(self._read, self.file.stat.size_bytes)

    def _load(self, index_dir: str) -> bool:
        """The table of an earlier build; a damaged one is made anew."""
        members, names = (
            os.path.join(index_dir, f"{self.key}.{what}.arrow") for what in ("members", "names")
        )
        if not os.path.exists(members):
            return False
        try:
            table = Table(members, MEMBERS)
            self.names = NameBlocks(names, table.num_rows)
        except StaleIndexError:
            return False
        self.columns = table.columns
        self.num_members = table.num_rows
        self.directory_crc32 = table.meta["directory_crc32"]
        return True

    def _hold(self, found: MemberTable) -> None:
        self.names = found.name
        self.columns = {name: Stored(values=values) for name, values in _columns(found).items()}
        self.num_members = len(found)
        self.directory_crc32 = found.directory_crc32

    def _keep(self, index_dir: str, found: MemberTable) -> None:
        """The member table, written last, says that both files are there."""
        writer = NameWriter()
        for start in range(0, len(found), _NAMES_AT_ONCE):
            writer.add(found.name.slice(start, _NAMES_AT_ONCE).to_pylist())
        writer.write(os.path.join(index_dir, self.key + ".names.arrow"))
        write_table(
            os.path.join(index_dir, self.key + ".members.arrow"),
            MEMBERS,
            _columns(found),
            extra={"directory_crc32": found.directory_crc32},
        )

    def _read(self, offset: int, size: int) -> bytes:
        return self._whole(
            self._store.read(self.file.url, offset, size, deadline_s=self._deadline_s),
            offset,
            size,
        )

    def _part(self, access: Access, offset: int, size: int) -> bytes:
        return self._whole(access.read(self.file.url, offset, size), offset, size)

    def _whole(self, data: bytes, offset: int, size: int) -> bytes:
        if len(data) != size:
            raise ArchiveError(
                f"ends at {offset + len(data)}, listed with {self.file.stat.size_bytes} bytes",
                shard=self._shown,
            )
        return data


def _columns(found: MemberTable) -> dict[str, NDArray[Any]]:
    columns = {name: getattr(found, name) for name in MEMBERS if name != "mtime_ns"}
    columns["mtime_ns"] = np.zeros(len(found), dtype=np.uint8)
    return columns
