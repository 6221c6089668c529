"""The files of an index as they are used: sources, shards, archives, and their mapped tables.

Invariants: a file is mapped at its first use; so many stay mapped as a process may map, those that
were used last.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache
from dataservice.core.packspec import ShardRef
from dataservice.storage.archives.name_blocks import KeptBlocks, NameBlocks
from dataservice.storage.listing import name_below
from dataservice.storage.manifest import ArchiveEntry, ShardEntry, SourceEntry, TableFile
from dataservice.storage.tables import IMAGES, MEMBERS, SAMPLES, Column, Table

if TYPE_CHECKING:
    from dataservice.storage.index import Index

Ints = NDArray[np.int64]

_OPEN_TABLES = 16_384
_OPEN_NAMES = 1024
_KEPT_NAME_BLOCKS = 2048
"""About 50 MB."""


class IndexTables:
    """Mapped files, those last used kept open: there are limits on how many a process may map."""

    def __init__(self, index_dir: str) -> None:
        self._index_dir = index_dir
        self._tables: LRUCache[str, Table] = LRUCache(_OPEN_TABLES)
        self._names: LRUCache[str, NameBlocks] = LRUCache(_OPEN_NAMES)
        self._blocks: KeptBlocks = LRUCache(_KEPT_NAME_BLOCKS)

    def columns(self, file: TableFile, names: Sequence[str]) -> dict[str, Column]:
        return self._tables.get(
            file.name,
            lambda: Table(self._path(file), names, size_bytes=file.size_bytes),
        ).columns

    def names(self, file: TableFile, num_names: int) -> NameBlocks:
        return self._names.get(
            file.name,
            lambda: NameBlocks(
                self._path(file), num_names, size_bytes=file.size_bytes, kept=self._blocks
            ),
        )

    def _path(self, file: TableFile) -> str:
        return os.path.join(self._index_dir, file.name)


class IndexArchive:
    """A place of images: a zip or tar, the used files of a folder, or a record file itself."""

    def __init__(self, tables: IndexTables, entry: ArchiveEntry) -> None:
        self._tables = tables
        self.entry = entry

    @property
    def members(self) -> dict[str, Column]:
        assert self.entry.members is not None
        return self._tables.columns(self.entry.members, MEMBERS)

    def name(self, member: int) -> str:
        assert self.entry.names is not None
        return self._tables.names(self.entry.names, self.entry.num_members)[member]

    def names_of(self, members: Ints) -> list[str]:
        assert self.entry.names is not None
        return self._tables.names(self.entry.names, self.entry.num_members).take(members)


class IndexShard:
    """A record file of a source and its tables."""

    def __init__(
        self, index: Index, source: SourceEntry, entry: ShardEntry, first_row: int
    ) -> None:
        self.first_row = first_row
        """Of the source."""
        self._tables = index.tables
        self._all_archives = index.archives
        self._source = source
        self.entry = entry
        self.ref = ShardRef(
            source=source.name,
            name=entry.name,
            url=entry.url,
            size_bytes=entry.size_bytes,
            mtime_ns=entry.mtime_ns,
            packing=entry.packing,
            unpacked_bytes=entry.unpacked_bytes,
        )
        self.key_prefix = f"{source.name}/{entry.name}@"

    @property
    def samples(self) -> dict[str, Column]:
        return self._tables.columns(self.entry.samples, SAMPLES)

    @property
    def images(self) -> dict[str, Column]:
        return self._tables.columns(self.entry.images, IMAGES)

    @cached_property
    def archives(self) -> list[tuple[IndexArchive, ShardRef | None]]:
        """Each with its shard; None for a folder, whose files are shards of their own."""
        found = []
        for position in self.entry.archives:
            archive = self._all_archives[position]
            found.append((archive, self._ref_of(archive.entry)))
        return found

    def _ref_of(self, entry: ArchiveEntry) -> ShardRef | None:
        if entry.kind == "folder":
            return None
        if entry.kind in ("inline", "parquet"):
            return self.ref
        return ShardRef(
            source=self._source.name,
            name=name_below(self._source.root, entry.url),
            url=entry.url,
            size_bytes=entry.size_bytes,
            mtime_ns=entry.mtime_ns,
        )

    def image_shard(self, number: int, member: int) -> ShardRef:
        """The shard that holds a member of the shard's archive `number`."""
        archive, ref = self.archives[number]
        if ref is not None:
            return ref
        url = posixpath.join(archive.entry.url, archive.name(member))
        return ShardRef(
            source=self._source.name,
            name=name_below(self._source.root, url),
            url=url,
            size_bytes=archive.members["size_bytes"].item(member),
            mtime_ns=archive.members["mtime_ns"].item(member),
        )


class IndexSource:
    """Its shards, in the order of their rows."""

    def __init__(self, index: Index, entry: SourceEntry) -> None:
        self.entry = entry
        firsts = accumulate((shard.num_samples for shard in entry.shards), initial=0)
        self.shards = [
            index.make_shard(entry, shard, first)
            for shard, first in zip(entry.shards, firsts, strict=False)
        ]
        self.stats = index.stats_of(entry)
