"""Builds the index: reads every record file and archive directory once, and of pictures only
headers.

Invariants: what is already known is not read again: a shard's tables are named by everything that
they follow from (file, size, mtime, counter, format, image archives, index version), so a build
that was stopped goes on where it was. A record that cannot be used is reported with file, line and
reason and never stops the index. The manifest is replaced last, so an open index stays whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dataservice.errors import ConfigError, StaleIndexError
from dataservice.storage.archives import ARCHIVE_PREFIX, Archives, archive_key
from dataservice.storage.archives.lookup import write_lookup
from dataservice.storage.archives.opened import lookup_name
from dataservice.storage.fingerprints import RecordFileIdentity, source_fingerprint
from dataservice.storage.index_executor import AsItFits, IndexExecutor
from dataservice.storage.index_report import (
    IndexReport,
    Progress,
    ProgressCounter,
    report_of,
    write_rejected,
)
from dataservice.storage.index_shard import SHARD_PREFIX, ShardResult, load_shard, shard_key
from dataservice.storage.index_tasks import (
    COUNT_PREFIX,
    ArchiveTask,
    BuildContext,
    CounterFactory,
    CountTask,
    Done,
    Running,
    ShardTask,
    count_key,
    kept_count,
)
from dataservice.storage.listing import FoundFile, SourceListing, list_source, name_below
from dataservice.storage.manifest import (
    ArchiveEntry,
    Manifest,
    ShardEntry,
    SourceEntry,
    make_manifest,
    read_manifest,
    write_manifest,
)
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import TEMPORARY_PREFIX
from dataservice.storage.taking import ALL, Taken, taken_rows

SCRATCH_PREFIX = ".building-"
_LOCK_NAME = ".lock"
_OURS = (SHARD_PREFIX, ARCHIVE_PREFIX, COUNT_PREFIX)


def build_index(
    sources: Sequence[SourceFiles],
    index_dir: str,
    *,
    counter: CounterFactory,
    progress: Progress | None = None,
    executor: IndexExecutor | None = None,
    store: Store | None = None,
    deadline_s: float = 60.0,
) -> IndexReport:
    """Bring the index in `index_dir` up to date with the sources.

    `executor` does the reading: None = as it fits, in this process or in several.

    Raises ConfigError (a pattern matches nothing, a source named twice, another build runs) and
    StorageError (a record file or archive cannot be read for now: call again, it goes on).
    """
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"sources: a name is used twice: {', '.join(names)}")
    os.makedirs(index_dir, exist_ok=True)
    own_store = store or Store()
    try:
        with _only_builder(index_dir), _scratch(index_dir) as scratch_dir:
            context = BuildContext(
                index_dir=index_dir,
                scratch_dir=scratch_dir,
                counter=counter,
                deadline_s=deadline_s,
            )
            archives = Archives(own_store, index_dir, deadline_s=deadline_s)
            try:
                runner = executor or AsItFits(own_store)
                return _Build(context, own_store, archives, runner, progress).run(sources)
            finally:
                archives.close()
    finally:
        if store is None:
            own_store.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """A record file, and what an earlier build or a task makes of it."""

    file: FoundFile
    task: ShardTask
    result: ShardResult | None


class _Build:
    def __init__(
        self,
        context: BuildContext,
        store: Store,
        archives: Archives,
        executor: IndexExecutor,
        progress: Progress | None,
    ) -> None:
        self._context = context
        self._index_dir = context.index_dir
        self._store = store
        self._archives = archives
        self._executor = executor
        self._progress = progress
        self._counter = context.counter().fingerprint
        self._deadline_s = context.deadline_s
        self._keep: set[str] = set()
        """First part of the names of the index files in use."""

    def run(self, sources: Sequence[SourceFiles]) -> IndexReport:
        listings = [
            list_source(source, self._store, deadline_s=self._deadline_s) for source in sources
        ]
        taken = self._taken(listings)
        before = _Before(self._index_dir)
        planned = [
            self._plan(listing, rows, before) for listing, rows in zip(listings, taken, strict=True)
        ]
        results = self._read(listings, planned)
        write_rejected(self._index_dir, [shard for shards in results for shard in shards])
        manifest = self._manifest(listings, results)
        write_manifest(self._index_dir, manifest)
        self._remove_unused()
        by_source = [
            (listing.files.name, shards) for listing, shards in zip(listings, results, strict=True)
        ]
        return report_of(self._index_dir, manifest.digest, by_source)

    def _taken(self, listings: Sequence[SourceListing]) -> list[list[Taken | None]]:
        """Of each record file of each source; None: all of it."""
        files = [file for found in listings if found.files.take != ALL for file in found.records]
        keys = {file.url: count_key(file) for file in files}
        self._keep |= set(keys.values())
        paths = {url: os.path.join(self._index_dir, key + ".json") for url, key in keys.items()}
        counts = {url: kept_count(path) for url, path in paths.items()}
        tasks = [
            CountTask(file=file, path=paths[file.url]) for file in files if counts[file.url] is None
        ]
        for state in self._executor.run(self._context, tasks):
            if isinstance(state, Done) and isinstance(state.result, int):
                counts[tasks[state.number].file.url] = state.result
        return [
            [None] * len(found.records)
            if found.files.take == ALL
            else list(taken_rows(found.files.take, [counts[f.url] or 0 for f in found.records]))
            for found in listings
        ]

    def _plan(
        self, listing: SourceListing, taken: Sequence[Taken | None], before: _Before
    ) -> list[_Planned]:
        planned = []
        for file, beside, rows in zip(listing.records, listing.beside, taken, strict=True):
            roots = tuple(root for root in listing.roots if root not in beside)
            images = (*beside, *roots)
            key = shard_key(listing.files, file, images, rows, self._counter)
            self._keep.add(key)
            self._keep |= {archive_key(found) for found in images if not found.stat.is_folder}
            result = load_shard(self._index_dir, key, self._store, deadline_s=self._deadline_s)
            task = ShardTask(
                key=key,
                files=listing.files,
                file=file,
                name=name_below(listing.root, file.url),
                beside=beside,
                roots=roots,
                taken=rows,
                before=before.shard(listing.files.name, file.url),
                archives_before=before.archives(listing.files.name, file.url),
            )
            planned.append(_Planned(file=file, task=task, result=result))
        return planned

    def _read(
        self, listings: Sequence[SourceListing], planned: Sequence[Sequence[_Planned]]
    ) -> list[list[ShardResult]]:
        """The shards of each source, those that are not there yet by tasks."""
        every = [item for items in planned for item in items]
        counter = ProgressCounter(sum(item.file.stat.size_bytes for item in every), self._progress)
        missing = [item for item in every if item.result is None]
        done = {item.task.key: item.result for item in every if item.result is not None}
        for item in every:
            if item.result is not None:
                counter.finished(None, item.file.stat.size_bytes, item.result)
        self._read_roots(listings)
        if missing:
            self._write_lookups(listings)
        for state in self._executor.run(self._context, [item.task for item in missing]):
            item = missing[state.number]
            if isinstance(state, Running):
                counter.running(state, item.task.name)
            elif isinstance(state.result, ShardResult):
                done[item.task.key] = state.result
                counter.finished(state.number, item.file.stat.size_bytes, state.result)
        return [
            [_named(done[item.task.key], item.task.name) for item in items] for items in planned
        ]

    def _read_roots(self, listings: Sequence[SourceListing]) -> None:
        """All directories of image roots, those that are not kept by tasks."""
        roots = {
            root.url: root
            for found in listings
            for root in found.roots
            if not root.stat.is_folder and not self._is_kept(root)
        }
        tasks = [ArchiveTask(file=root) for root in roots.values()]
        for _ in self._executor.run(self._context, tasks):
            pass

    def _is_kept(self, file: FoundFile) -> bool:
        path = os.path.join(self._index_dir, archive_key(file) + ".members.arrow")
        return os.path.exists(path)

    def _write_lookups(self, listings: Sequence[SourceListing]) -> None:
        for listing in listings:
            for group in self._archives.groups(listing.roots):
                path = os.path.join(self._context.scratch_dir, lookup_name(group))
                if not os.path.exists(path):
                    write_lookup(path, group)

    def _manifest(
        self, listings: Sequence[SourceListing], results: Sequence[Sequence[ShardResult]]
    ) -> Manifest:
        positions: dict[ArchiveEntry, int] = {}
        sources = []
        for listing, shards in zip(listings, results, strict=True):
            entries = []
            for shard in shards:
                numbers = [
                    positions.setdefault(archive, len(positions)) for archive in shard.archives
                ]
                entries.append(replace(shard.entry, archives=tuple(numbers)))
            sources.append(
                SourceEntry(
                    name=listing.files.name,
                    root=listing.root,
                    fingerprint=self._fingerprint(listing, shards),
                    shards=tuple(entries),
                )
            )
        return make_manifest(
            counter=self._counter, archives=tuple(positions), sources=tuple(sources)
        )

    def _fingerprint(self, listing: SourceListing, shards: Sequence[ShardResult]) -> str:
        records = [
            RecordFileIdentity(
                name=shard.entry.name, size_bytes=shard.entry.size_bytes, crc32=shard.entry.crc32
            )
            for shard in shards
        ]
        archives = [
            *(self._archives.identity(root) for root in listing.roots),
            *(identity for shard in shards for identity in shard.beside),
        ]
        known = [identity for identity in archives if identity]
        return source_fingerprint(listing.files, listing.root, records, known)

    def _remove_unused(self) -> None:
        for name in os.listdir(self._index_dir):
            if name.startswith(_OURS) and name.split(".")[0] not in self._keep:
                os.unlink(os.path.join(self._index_dir, name))


class _Before:
    """The index that is there now."""

    def __init__(self, index_dir: str) -> None:
        try:
            self._manifest: Manifest | None = read_manifest(index_dir)
        except StaleIndexError:
            self._manifest = None
        sources = self._manifest.sources if self._manifest else ()
        self._shards = {
            (source.name, shard.url): shard for source in sources for shard in source.shards
        }

    def shard(self, source: str, url: str) -> ShardEntry | None:
        return self._shards.get((source, url))

    def archives(self, source: str, url: str) -> tuple[ArchiveEntry, ...]:
        """Those of that shard."""
        shard = self.shard(source, url)
        if shard is None or self._manifest is None:
            return ()
        return tuple(self._manifest.archives[position] for position in shard.archives)


def _named(result: ShardResult, name: str) -> ShardResult:
    """Names are below a root that may have changed since the tables were written."""
    return replace(result, entry=replace(result.entry, name=name))


@contextmanager
def _only_builder(index_dir: str) -> Iterator[None]:
    fd = os.open(os.path.join(index_dir, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is building the index in {index_dir}") from None
        yield
    finally:
        os.close(fd)


@contextmanager
def _scratch(index_dir: str) -> Iterator[str]:
    """A folder that ends with the build; what a killed one left is removed first."""
    for name in os.listdir(index_dir):
        path = os.path.join(index_dir, name)
        if name.startswith(SCRATCH_PREFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(TEMPORARY_PREFIX):
            os.unlink(path)
    with tempfile.TemporaryDirectory(
        prefix=SCRATCH_PREFIX, dir=index_dir, ignore_cleanup_errors=True
    ) as path:
        yield path
