"""The lazy index: an index whose rows are counted when they are needed, a block at a time.

Invariants: it gives the same rows, specs and plan as the full index over the same data; opening
reads the manifest, and the offsets of a record file are mapped at its first use. Rows that are not
counted go to `blocks.on_missing`. The object may be read by many threads. Close it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import PackSpec, ShardRef
from dataservice.core.settings import PlanSettings
from dataservice.core.tables import SampleColumns, SourceStats, WindowPlan
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError
from dataservice.storage.index import Index, items_of
from dataservice.storage.index_files import IndexArchive, IndexShard
from dataservice.storage.index_rows import FolderFile, Rejected
from dataservice.storage.lazy.block_store import BlockStore
from dataservice.storage.lazy.blocks import (
    Blocks,
    Key,
    Places,
    folder_file,
    image_columns,
    sample_columns,
)
from dataservice.storage.lazy.manifest import (
    LazyManifest,
    LazyShard,
    LazySource,
    read_lazy_manifest,
)
from dataservice.storage.listing import FoundFile
from dataservice.storage.manifest import (
    INDEX_VERSION,
    ArchiveEntry,
    Manifest,
    ShardEntry,
    SourceEntry,
    TableFile,
)
from dataservice.storage.membertable import AS_IT_IS
from dataservice.storage.tables import MEMBERS, Column

Ints = NDArray[np.int64]

_NO_TABLE = TableFile(name="", size_bytes=0)


def check_lazy_plan(settings: PlanSettings) -> None:
    """ConfigError for a plan that must know of every sample before the first one is read."""
    if settings.segregate is not None:
        raise ConfigError(
            "plan.segregate: needs to know which samples have images, and index: lazy counts them "
            "while training runs; set index: full, or leave segregate out"
        )
    if settings.epochs is not None or settings.weight_by != "tokens":
        return
    for source in settings.sources:
        if source.mean_tokens is None:
            raise ConfigError(
                f"sources: mean_tokens of {source.name!r} is missing: plan.weight_by: tokens needs "
                "the mean tokens of a sample, and index: lazy does not count them all; give "
                "mean_tokens of every source, set weight_by: samples, or index: full"
            )


class LazyIndex(Index):
    """`core.tables.IndexView`, and what `Index` offers besides."""

    def __init__(self, index_dir: str, manifest: LazyManifest) -> None:
        self.lazy = manifest
        self._store = BlockStore(index_dir, manifest.block_files())
        self.blocks = Blocks(index_dir, manifest, self._store)
        self.archive_of = {entry.url: entry for entry in manifest.archives}
        self._closers: list[Callable[[], None]] = []
        self._files = [0, *accumulate(len(source.shards) for source in manifest.sources)]
        shards = [(of.name, shard) for of in manifest.sources for shard in of.shards]
        self._shards = {
            (source, shard.name): (file, shard) for file, (source, shard) in enumerate(shards)
        }
        """By source and name: number of the record file over all sources, and the file."""
        super().__init__(index_dir, _as_manifest(manifest))

    @classmethod
    def open(cls, index_dir: str) -> LazyIndex:
        """Raises StaleIndexError when there is no lazy index of this version, or a damaged one."""
        return cls(index_dir, read_lazy_manifest(index_dir))

    def on_close(self, call: Callable[[], None]) -> None:
        """Called once, before the index closes."""
        self._closers.append(call)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()
        self._store.close()

    def roots(self, source: str) -> tuple[FoundFile, ...]:
        """Where the images of a source are looked up. Raises KeyError."""
        return {of.name: of.roots for of in self.lazy.sources}[source]

    def missing(self, source: int | Ints, rows: Ints) -> list[Key]:
        """The blocks with some rows that are not counted yet, as `columns` would ask for them."""
        found: list[Key] = []
        for shard, local, _ in self._rows.split(source, rows):
            assert isinstance(shard, LazyIndexShard)
            found += self.blocks.missing(shard.file, local)
        return found

    def columns(self, source: int | Ints, rows: Ints) -> SampleColumns:
        self._need(source, rows)
        return super().columns(source, rows)

    def pack_specs(
        self, window: WindowPlan, numbers: Sequence[int], *, rules: VisionRules
    ) -> list[PackSpec]:
        items = items_of(window, numbers)
        self._need(window.source[items], window.row[items])
        return super().pack_specs(window, numbers, rules=rules)

    def shards_of(self, window: WindowPlan) -> tuple[ShardRef, ...]:
        self._need(window.source, window.row)
        return super().shards_of(window)

    def shards_beside(self, source: int, number: int) -> tuple[ShardRef, ...]:
        """As in `Index`; of other archives than those of the file's stem it learns as blocks are
        read."""
        shard = self._sources[source].shards[number]
        assert isinstance(shard, LazyIndexShard)
        return tuple(dict.fromkeys((shard.ref, *shard.beside, *shard.read_from)))

    def rejected(self) -> Iterator[tuple[LazySource, LazyShard, Rejected]]:
        """The records found so far that cannot be used; reads every kept block."""
        for source, first in zip(self.lazy.sources, self._files, strict=False):
            for file, shard in enumerate(source.shards, first):
                for number in self.blocks.kept(file):
                    block = self.blocks.peek((file, number))
                    for rejected in block.rejected if block is not None else ():
                        yield source, shard, rejected

    def num_counted(self) -> int:
        """Blocks that are kept."""
        return sum(len(self.blocks.kept(file)) for file in range(self._files[-1]))

    def make_shard(self, source: SourceEntry, entry: ShardEntry, first_row: int) -> IndexShard:
        file, lazy = self._shards[source.name, entry.name]
        return LazyIndexShard(self, source, entry, first_row, file=file, lazy=lazy)

    def stats_of(self, entry: SourceEntry) -> SourceStats:
        return replace(super().stats_of(entry), shard_text_samples=None, shard_vision_samples=None)

    def _need(self, source: int | Ints, rows: Ints) -> None:
        missing = self.missing(source, rows)
        if missing:
            self.blocks.on_missing(missing)


class LazyIndexShard(IndexShard):
    def __init__(
        self,
        index: LazyIndex,
        source: SourceEntry,
        entry: ShardEntry,
        first_row: int,
        *,
        file: int,
        lazy: LazyShard,
    ) -> None:
        super().__init__(index, source, entry, first_row)
        self.file = file
        """Number of the record file over all sources."""
        self._index = index
        self._lazy = lazy
        self._samples = sample_columns(index.blocks, file)
        self._images = image_columns(index.blocks, file, Places(self._add_place))
        self._places: list[tuple[IndexArchive, ShardRef | None]] = []

    @property
    def samples(self) -> dict[str, Column]:
        return self._samples

    @property
    def images(self) -> dict[str, Column]:
        return self._images

    @property
    def archives(self) -> list[tuple[IndexArchive, ShardRef | None]]:
        """Those that the images of blocks read so far are in."""
        return self._places

    def _add_place(self, place: str, inside: bool) -> None:
        if inside:
            kind = "parquet" if place else "inline"
            entry = _entry(kind, self.ref.url, column=place)
        else:
            entry = self._index.archive_of.get(place) or _entry("folder", place)
        archive = IndexArchive(self._tables, entry)
        if entry.kind == "folder":
            archive = _Folder(self, entry)
        self._places.append((archive, self._ref_of(entry)))

    @property
    def beside(self) -> list[ShardRef]:
        """The archives of the record file's own stem."""
        known = self._index.archive_of
        entries = [known[file.url] for file in self._lazy.beside if file.url in known]
        return [ref for entry in entries if (ref := self._ref_of(entry)) is not None]

    @property
    def read_from(self) -> list[ShardRef]:
        """Archives that images of blocks read so far are in."""
        return [ref for _, ref in list(self._places) if ref is not None]

    def folder_file(self, member: int) -> FolderFile:
        return folder_file(self._index.blocks, self.file, member)


class _Folder(IndexArchive):
    """The files of a folder that counted blocks name."""

    def __init__(self, shard: LazyIndexShard, entry: ArchiveEntry) -> None:
        super().__init__(shard._tables, replace(entry, members=_NO_TABLE, names=_NO_TABLE))
        self._shard = shard

    @property
    def members(self) -> dict[str, Column]:
        return {name: _FolderColumn(self._shard, name) for name in MEMBERS}

    def name(self, member: int) -> str:
        return self._shard.folder_file(member).name

    def names_of(self, members: Ints) -> list[str]:
        return [self.name(member) for member in members.tolist()]


@dataclass(frozen=True, slots=True)
class _FolderColumn:
    shard: LazyIndexShard
    name: str

    def item(self, row: int) -> int:
        file = self.shard.folder_file(row)
        values = {
            "stored_bytes": file.size_bytes,
            "size_bytes": file.size_bytes,
            "mtime_ns": file.mtime_ns,
            "method": AS_IT_IS,
        }
        return values.get(self.name, 0)

    def take(self, rows: Ints) -> Ints:
        return np.array([self.item(row) for row in rows.tolist()], dtype=np.int64)

    def slice(self, start: int, stop: int) -> Ints:
        return self.take(np.arange(start, stop, dtype=np.int64))


def _entry(kind: str, url: str, *, column: str = "") -> ArchiveEntry:
    return ArchiveEntry(
        kind=kind,
        url=url,
        size_bytes=0,
        mtime_ns=0,
        num_members=0,
        directory_crc32=0,
        members=None,
        names=None,
        column=column,
    )


def _as_manifest(lazy: LazyManifest) -> Manifest:
    """What `Index` needs of it; what is not counted yet is 0."""
    return Manifest(
        version=INDEX_VERSION,
        counter=lazy.counter,
        archives=(),
        sources=tuple(
            SourceEntry(
                name=source.name,
                root=source.root,
                fingerprint=source.fingerprint,
                shards=tuple(_shard_entry(shard) for shard in source.shards),
            )
            for source in lazy.sources
        ),
        digest=lazy.digest,
    )


def _shard_entry(shard: LazyShard) -> ShardEntry:
    return ShardEntry(
        name=shard.name,
        url=shard.url,
        size_bytes=shard.size_bytes,
        mtime_ns=shard.mtime_ns,
        packing=shard.packing,
        unpacked_bytes=shard.unpacked_bytes,
        crc32=shard.crc32,
        num_samples=shard.num_rows,
        num_text_samples=0,
        num_rejected=0,
        num_images=0,
        text_tokens=0,
        loss_tokens=0,
        digest="",
        samples=_NO_TABLE,
        images=_NO_TABLE,
        archives=(),
    )
