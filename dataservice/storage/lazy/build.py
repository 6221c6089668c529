"""Brings a lazy index up to date: finds where records are and reads archives' directories, and
counts nothing.

Invariants: a record file is read once, to find its records, and its offsets are kept by everything
that they follow from, so a scan that was stopped goes on where it was and one that is up to date
costs a stat of every file; of archives only directories are read. Memory: the offsets of the record
files that are scanned at once, 12 bytes a record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from dataservice.errors import ArchiveError, StaleIndexError
from dataservice.storage.archives import Archive, Archives
from dataservice.storage.archives.lookup_files import keep_lookup, keep_lookups
from dataservice.storage.archives.opened import LOOKUP_PREFIX
from dataservice.storage.fingerprints import (
    ArchiveIdentity,
    RecordFileIdentity,
    source_fingerprint,
)
from dataservice.storage.index_folder import name_by_digest, remove_unused, take_folder
from dataservice.storage.lazy.manifest import (
    BLOCKS_PREFIX,
    LAZY_VERSION,
    LazyManifest,
    LazyShard,
    LazySource,
    blocks_name,
    write_lazy_manifest,
)
from dataservice.storage.listing import (
    FoundFile,
    SourceListing,
    files_key,
    list_sources,
    name_below,
)
from dataservice.storage.manifest import INDEX_VERSION, ArchiveEntry, TableFile
from dataservice.storage.objects import Store
from dataservice.storage.recordfiles import packing_of, scan_offsets
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import Table, write_table
from dataservice.storage.taking import ALL, taken_rows

OFFSETS = ("offset", "length")
OFFSETS_PREFIX = "offsets-"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanProgress:
    """Bytes are of record files, those that need no reading included."""

    done_bytes: int
    total_bytes: int
    num_records: int
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReport:
    manifest: LazyManifest
    files_read: int
    files_reused: int

    @property
    def num_records(self) -> int:
        return sum(shard.num_rows for of in self.manifest.sources for shard in of.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scanned:
    """A record file whose records are known."""

    offsets: TableFile
    num_records: int
    crc32: int
    unpacked_bytes: int
    reused: bool


def scan_sources(
    sources: Sequence[SourceFiles],
    index_dir: str,
    *,
    counter: str,
    progress: Callable[[ScanProgress], None] | None = None,
    store: Store | None = None,
    deadline_s: float = 60.0,
    threads: int = 4,
) -> ScanReport:
    """`counter` is the fingerprint of what will count the tokens.

    Raises ConfigError (a pattern matches nothing, a source named twice) and StorageError (a file
    cannot be read for now: call again, it goes on).
    """
    take_folder(index_dir)
    own_store = store or Store()
    try:
        scan = _Scan(index_dir, counter, own_store, deadline_s, progress, threads)
        return scan.run(sources)
    finally:
        if store is None:
            own_store.close()


class _Scan:
    def __init__(
        self,
        index_dir: str,
        counter: str,
        store: Store,
        deadline_s: float,
        progress: Callable[[ScanProgress], None] | None,
        threads: int,
    ) -> None:
        self._index_dir = index_dir
        self._counter = counter
        self._store = store
        self._deadline_s = deadline_s
        self._progress = progress
        self._threads = threads
        self._lookups: set[str] = set()
        """Names of the lookups in use."""

    def run(self, sources: Sequence[SourceFiles]) -> ScanReport:
        listings = list_sources(
            sources, self._store, deadline_s=self._deadline_s, leave_out=self._index_dir
        )
        scanned = self._record_files([file for of in listings for file in of.records])
        archives = self._archives(listings)
        self._keep_lookups(listings)
        manifest = write_lazy_manifest(
            self._index_dir,
            LazyManifest(
                version=LAZY_VERSION,
                counter=self._counter,
                archives=tuple(archives.values()),
                sources=tuple(self._source(of, scanned, archives) for of in listings),
            ),
        )
        self._remove_unused(manifest)
        reused = sum(of.reused for of in scanned.values())
        return ScanReport(manifest=manifest, files_read=len(scanned) - reused, files_reused=reused)

    # ---- record files ------------------------------------------------------------------------

    def _record_files(self, files: list[FoundFile]) -> dict[str, _Scanned]:
        """By URL."""
        total = sum(file.stat.size_bytes for file in files)
        done = records = 0
        found: dict[str, _Scanned] = {}
        with ThreadPoolExecutor(self._threads, thread_name_prefix="scan") as pool:
            running = {pool.submit(self._record_file, file): file for file in files}
            try:
                for future in as_completed(running):
                    file = running[future]
                    found[file.url] = future.result()
                    done += file.stat.size_bytes
                    records += found[file.url].num_records
                    if self._progress is not None:
                        self._progress(
                            ScanProgress(
                                done_bytes=done,
                                total_bytes=total,
                                num_records=records,
                                file=file.url,
                            )
                        )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return found

    def _record_file(self, file: FoundFile) -> _Scanned:
        parts = [LAZY_VERSION, INDEX_VERSION, file.url, file.stat.size_bytes, file.stat.mtime_ns]
        key = name_by_digest(OFFSETS_PREFIX, json.dumps(parts))
        path = os.path.join(self._index_dir, key + ".arrow")
        try:
            return _scanned(path, reused=True)
        except StaleIndexError:
            pass  # not there, or damaged
        offsets = scan_offsets(
            self._store, file.url, file.stat.size_bytes, deadline_s=self._deadline_s
        )
        write_table(
            path,
            OFFSETS,
            {"offset": offsets.offset, "length": offsets.length},
            extra={
                "crc32": offsets.crc32,
                "unpacked_bytes": offsets.unpacked_bytes,
                "unread": offsets.unread,
            },
        )
        return _scanned(path, reused=False)

    # ---- archives ----------------------------------------------------------------------------

    def _archives(self, listings: Sequence[SourceListing]) -> dict[str, ArchiveEntry]:
        """All that may be searched and are good as a whole, by URL; their directories are read and
        kept."""
        files = {file.url: file for of in listings for file in _searched(of)}
        own = {file.url for of in listings for beside in of.beside for file in beside}
        with ThreadPoolExecutor(self._threads, thread_name_prefix="directory") as pool:
            entries = pool.map(lambda file: self._archive(file, file.url in own), files.values())
            return {entry.url: entry for entry in entries if entry is not None}

    def _archive(self, file: FoundFile, beside: bool) -> ArchiveEntry | None:
        """None for one that is bad; `beside` a record file it is searched alone."""
        try:
            archive = Archive(file, self._store, self._index_dir, deadline_s=self._deadline_s)
        except ArchiveError:
            return None
        if beside:
            self._lookups.add(keep_lookup(self._index_dir, [archive]))
        return archive.entry

    def _keep_lookups(self, listings: Sequence[SourceListing]) -> None:
        archives = Archives(self._store, self._index_dir, deadline_s=self._deadline_s)
        try:
            for listing in listings:
                self._lookups |= set(keep_lookups(self._index_dir, archives, listing.roots))
        finally:
            archives.close()

    # ---- manifest ----------------------------------------------------------------------------

    def _source(
        self,
        listing: SourceListing,
        scanned: dict[str, _Scanned],
        archives: dict[str, ArchiveEntry],
    ) -> LazySource:
        files = listing.files
        of_files = [scanned[file.url] for file in listing.records]
        taken = taken_rows(files.take, [of.num_records for of in of_files])
        roots = files_key(listing.roots)
        shards = []
        for number, (file, of) in enumerate(zip(listing.records, of_files, strict=True)):
            packing = packing_of(file.url)
            shard = LazyShard(
                name=name_below(listing.root, file.url),
                url=file.url,
                size_bytes=file.stat.size_bytes,
                mtime_ns=file.stat.mtime_ns,
                packing=packing,
                unpacked_bytes=of.unpacked_bytes if packing in ("gz", "zst", "zip") else 0,
                crc32=of.crc32,
                num_records=of.num_records,
                taken=None if files.take == ALL else taken[number],
                offsets=of.offsets,
                beside=listing.beside[number],
                blocks="",
            )
            name = blocks_name(files, shard, roots, self._counter)
            shards.append(replace(shard, blocks=name))
        return LazySource(
            name=files.name,
            root=listing.root,
            fingerprint=_fingerprint(listing, shards, archives),
            roots=listing.roots,
            shards=tuple(shards),
        )

    def _remove_unused(self, manifest: LazyManifest) -> None:
        """Offsets, blocks and lookups that nothing refers to any more."""
        shards = [shard for of in manifest.sources for shard in of.shards]
        used = {shard.offsets.name for shard in shards} | {shard.blocks for shard in shards}
        used |= self._lookups
        remove_unused(self._index_dir, (OFFSETS_PREFIX, BLOCKS_PREFIX, LOOKUP_PREFIX), used)


def _searched(listing: SourceListing) -> list[FoundFile]:
    """The archives of a source: the image roots, then those beside record files."""
    files = (*listing.roots, *(file for beside in listing.beside for file in beside))
    return [file for file in files if not file.stat.is_folder]


def _fingerprint(
    listing: SourceListing, shards: Sequence[LazyShard], archives: dict[str, ArchiveEntry]
) -> str:
    return source_fingerprint(
        listing.files,
        listing.root,
        [RecordFileIdentity(name=s.name, size_bytes=s.size_bytes, crc32=s.crc32) for s in shards],
        [
            ArchiveIdentity(
                url=file.url,
                size_bytes=file.stat.size_bytes,
                directory_crc32=archives[file.url].directory_crc32 if file.url in archives else 0,
            )
            for file in _searched(listing)
        ],
    )


def _scanned(path: str, *, reused: bool) -> _Scanned:
    """Raises StaleIndexError."""
    table = Table(path, OFFSETS)
    return _Scanned(
        offsets=TableFile(name=os.path.basename(path), size_bytes=os.path.getsize(path)),
        num_records=table.num_rows,
        crc32=table.meta["crc32"],
        unpacked_bytes=table.meta["unpacked_bytes"],
        reused=reused,
    )
