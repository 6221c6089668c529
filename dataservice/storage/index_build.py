"""Builds the index: reads every record file and archive directory once, and of pictures only
headers.

Invariants: what is already known is not read again: a shard's tables are named by everything that
they follow from (file, size, mtime, counter, format, image archives, index version), so a build
that was stopped goes on where it was. A record that cannot be used is reported with file, line and
reason and never stops the index. The manifest is replaced last, and what it does not name any more
goes only when nobody has the index open, so an open index stays whole. A folder that cannot be
written to is as good as any when nothing has to be read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from dataservice.errors import ConfigError, StaleIndexError, StorageError
from dataservice.storage.archives import ARCHIVE_PREFIX, Archives, archive_key
from dataservice.storage.archives.lookup_files import keep_lookups
from dataservice.storage.fingerprints import RecordFileIdentity, source_fingerprint
from dataservice.storage.index_executor import AsItFits, IndexExecutor
from dataservice.storage.index_folder import (
    only_builder,
    remove_unused,
    scratch_folder,
    take_folder,
)
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
    Failed,
    Running,
    ShardTask,
    Task,
    count_key,
    kept_count,
)
from dataservice.storage.listing import (
    FoundFile,
    SourceListing,
    files_key,
    list_sources,
    name_below,
)
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
from dataservice.storage.taking import ALL, Taken, taken_rows

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_MOST_FAILED = 10
"""Files that cannot be read; the others are read as long as it is fewer."""
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

    Raises ConfigError (a pattern matches nothing, a source named twice, another build runs, the
    folder holds other files) and StorageError (a file cannot be read for now: call again, it goes
    on).
    """
    own_store = store or Store()
    archives = Archives(own_store, index_dir, deadline_s=deadline_s)

    def build_in(scratch_dir: str) -> _Build:
        context = BuildContext(
            index_dir=index_dir, scratch_dir=scratch_dir, counter=counter, deadline_s=deadline_s
        )
        return _Build(context, own_store, archives, executor or AsItFits(own_store), progress)

    try:
        take_folder(index_dir)
        with only_builder(index_dir), scratch_folder(index_dir) as scratch_dir:
            return build_in(scratch_dir).run(sources)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageError(
                f"index_dir {index_dir}: {error.strerror}; make room and run again: it goes on "
                "where it was"
            ) from error
        if error.errno not in _READ_ONLY:
            raise
        ready = build_in(index_dir).ready(sources)
        if ready is None:
            raise ConfigError(
                f"index_dir {index_dir} cannot be written to ({error}), and the index there is "
                "not up to date; name a folder that can be, or index where this one can"
            ) from error
        return ready
    finally:
        archives.close()
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
        listings = self._list(sources)
        roots = {listing.files.name: listing.roots for listing in listings}
        self._context = replace(self._context, roots=roots)
        planned = self._plans(listings, self._taken(listings))
        results = self._read(listings, planned)
        write_rejected(self._index_dir, [shard for shards in results for shard in shards])
        manifest = self._manifest(listings, results)
        write_manifest(self._index_dir, manifest)
        remove_unused(self._index_dir, _OURS, self._keep)
        return self._report(manifest, listings, results)

    def ready(self, sources: Sequence[SourceFiles]) -> IndexReport | None:
        """What `run` would give if nothing has to be read, else None; writes nothing."""
        listings = self._list(sources)
        try:
            planned = self._plans(listings, self._taken(listings))
            results = [
                [_named(item.result, item.task.name) for item in items if item.result]
                for items in planned
            ]
            if any(len(found) < len(items) for found, items in zip(results, planned, strict=True)):
                return None
            manifest = self._manifest(listings, results)
            if read_manifest(self._index_dir).digest != manifest.digest:
                return None
        except (OSError, StaleIndexError):
            return None
        return self._report(manifest, listings, results)

    def _list(self, sources: Sequence[SourceFiles]) -> list[SourceListing]:
        return list_sources(
            sources, self._store, deadline_s=self._deadline_s, leave_out=self._index_dir
        )

    def _report(
        self,
        manifest: Manifest,
        listings: Sequence[SourceListing],
        results: Sequence[Sequence[ShardResult]],
    ) -> IndexReport:
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

        def counted(state: Running | Done) -> None:
            if isinstance(state, Done) and isinstance(state.result, int):
                counts[tasks[state.number].file.url] = state.result

        self._run(tasks, counted)
        return [
            [None] * len(found.records)
            if found.files.take == ALL
            else list(taken_rows(found.files.take, [counts[f.url] or 0 for f in found.records]))
            for found in listings
        ]

    def _plans(
        self, listings: Sequence[SourceListing], taken: Sequence[Sequence[Taken | None]]
    ) -> list[list[_Planned]]:
        before = _Before(self._index_dir)
        return [
            self._plan(listing, rows, before) for listing, rows in zip(listings, taken, strict=True)
        ]

    def _plan(
        self, listing: SourceListing, taken: Sequence[Taken | None], before: _Before
    ) -> list[_Planned]:
        planned = []
        roots = files_key(listing.roots)
        archives = [*listing.roots, *(found for of in listing.beside for found in of)]
        self._keep |= {archive_key(found) for found in archives if not found.stat.is_folder}
        for file, beside, rows in zip(listing.records, listing.beside, taken, strict=True):
            key = shard_key(listing.files, file, beside, roots, rows, self._counter)
            self._keep.add(key)
            result = load_shard(self._index_dir, key, self._store, deadline_s=self._deadline_s)
            task = ShardTask(
                key=key,
                files=listing.files,
                file=file,
                name=name_below(listing.root, file.url),
                beside=beside,
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
            for listing in listings:
                keep_lookups(self._context.scratch_dir, self._archives, listing.roots)

        def read(state: Running | Done) -> None:
            item = missing[state.number]
            if isinstance(state, Running):
                counter.running(state, item.task.name)
            elif isinstance(state.result, ShardResult):
                done[item.task.key] = state.result
                counter.finished(state.number, item.file.stat.size_bytes, state.result)

        self._run([item.task for item in missing], read)
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
        self._run(tasks)

    def _run(
        self,
        tasks: Sequence[Task],
        told: Callable[[Running | Done], None] = lambda _: None,
    ) -> None:
        """Raises StorageError for files that could not be read when all others are, or when they
        are too many for that."""
        errors: list[StorageError] = []
        with closing(self._executor.run(self._context, tasks)) as states:
            for state in states:
                if not isinstance(state, Failed):
                    told(state)
                    continue
                errors.append(state.error)
                if len(errors) == _MOST_FAILED:
                    break
        if errors:
            more = f" (and {len(errors) - 1} files more)" if errors[1:] else ""
            raise StorageError(f"{errors[0]}{more}; run again: it goes on where it was")

    def _is_kept(self, file: FoundFile) -> bool:
        path = os.path.join(self._index_dir, archive_key(file) + ".members.arrow")
        return os.path.exists(path)

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
