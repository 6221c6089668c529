"""The files of an image folder that the records of one record file name, as a member table.

Invariants: a row a use, so a file that many records name may have several; names are held
compressed, numbers on disk once they are many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.storage.archives.access import ManyReads
from dataservice.storage.archives.folder import Folder
from dataservice.storage.archives.name_blocks import NameBlocks, NameWriter
from dataservice.storage.backends import ObjectStat
from dataservice.storage.index_rows import FolderFile
from dataservice.storage.manifest import ArchiveEntry, TableFile
from dataservice.storage.membertable import AS_IT_IS
from dataservice.storage.objects import Store
from dataservice.storage.spool import Spool
from dataservice.storage.tables import MEMBERS, Table, write_table

Ints = NDArray[np.int64]

_CHECKED_AT_ONCE = 1024


class FolderTable:
    def __init__(self, url: str, index_dir: str) -> None:
        self._url = url
        self._index_dir = index_dir
        self._names = NameWriter()
        self._size = Spool("u8", index_dir)
        self._mtime = Spool("i8", index_dir)

    def add(self, files: Sequence[FolderFile]) -> Ints:
        """The files' rows."""
        first = self._size.num_values
        self._names.add(file.name for file in files)
        self._size.add([file.size_bytes for file in files])
        self._mtime.add([file.mtime_ns for file in files])
        return np.arange(first, self._size.num_values, dtype=np.int64)

    def write(self, stem: str) -> ArchiveEntry:
        size, mtime = self._size.finish(), self._mtime.finish()
        zeros = np.zeros(len(size), dtype=np.uint8)
        columns = {
            "offset": zeros,
            "stored_bytes": size,
            "size_bytes": size,
            "method": np.full(len(size), AS_IT_IS, dtype=np.int8),
            "crc32": zeros,
            "mtime_ns": mtime,
            "problem": zeros,
        }
        members, names = f"{stem}.members.arrow", f"{stem}.names.arrow"
        written = write_table(os.path.join(self._index_dir, members), MEMBERS, columns)
        name_bytes = self._names.write(os.path.join(self._index_dir, names))
        return ArchiveEntry(
            kind="folder",
            url=self._url,
            size_bytes=0,
            mtime_ns=0,
            num_members=len(size),
            directory_crc32=0,
            members=TableFile(name=members, size_bytes=written.size_bytes),
            names=TableFile(name=names, size_bytes=name_bytes),
        )


def same_files(index_dir: str, entry: ArchiveEntry, store: Store, deadline_s: float) -> bool:
    """Whether the folder's files are still what the table says."""
    assert entry.members is not None and entry.names is not None
    table = Table(os.path.join(index_dir, entry.members.name), MEMBERS)
    names = NameBlocks(os.path.join(index_dir, entry.names.name), table.num_rows)
    folder = Folder(entry.url)
    reads = ManyReads(store, deadline_s=deadline_s)
    try:
        for start in range(0, table.num_rows, _CHECKED_AT_ONCE):
            stop = min(start + _CHECKED_AT_ONCE, table.num_rows)
            stats = reads.each(entry.url, folder.stat, [names[row] for row in range(start, stop)])
            sizes = table.columns["size_bytes"].slice(start, stop).tolist()
            mtimes = table.columns["mtime_ns"].slice(start, stop).tolist()
            for stat, size, mtime in zip(stats, sizes, mtimes, strict=True):
                if not isinstance(stat, ObjectStat):
                    return False
                if (stat.size_bytes, stat.mtime_ns) != (size, mtime):
                    return False
    finally:
        reads.close()
    return True
