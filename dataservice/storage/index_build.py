"""Builds the index: reads every JSONL file and zip directory once, and of pictures only headers.

Invariants: what is already known is not read again: a shard's tables are named by everything that
they follow from (file, size, mtime, counter, layout, image archives, index version), so a build
that was stopped goes on where it was. A record that cannot be used is reported with file, line and
reason and never stops the index. The manifest is replaced last, so an open index stays whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import BinaryIO

from dataservice.errors import ArchiveError, ConfigError
from dataservice.storage.archives import Folder, ImageFinder, ZipArchive, zip_key
from dataservice.storage.backends import local_path
from dataservice.storage.counting import RecordCounter
from dataservice.storage.index_shard import (
    Rejected,
    ShardBuilder,
    ShardResult,
    load_shard,
    shard_key,
)
from dataservice.storage.listing import (
    FoundFile,
    SourceListing,
    list_source,
    name_below,
    zip_beside,
)
from dataservice.storage.manifest import (
    ArchiveEntry,
    ShardEntry,
    SourceEntry,
    make_manifest,
    source_fingerprint,
    write_manifest,
)
from dataservice.storage.objects import Store
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import TEMPORARY_PREFIX, write_atomically

REJECTED_NAME = "rejected.jsonl"
_LOCK_NAME = ".lock"
_MAX_EXAMPLES = 20
_REMOTE_READERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexProgress:
    """Bytes are of JSONL files, those that need no reading included."""

    done_bytes: int
    total_bytes: int
    num_samples: int
    num_rejected: int
    shard: str


Progress = Callable[[IndexProgress], None]
"""Called often; draws or logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReport:
    name: str
    num_samples: int
    num_rejected: int
    num_images: int
    text_tokens: int
    loss_tokens: int
    shards_read: int
    shards_reused: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexReport:
    digest: str
    sources: tuple[SourceReport, ...]
    rejected_path: str
    """A JSONL file with one line for every record that is not in the index."""
    examples: tuple[Rejected, ...]
    """The first of them."""

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources)

    @property
    def num_rejected(self) -> int:
        return sum(source.num_rejected for source in self.sources)


def build_index(
    sources: Sequence[SourceFiles],
    index_dir: str,
    *,
    counter: RecordCounter,
    progress: Progress | None = None,
    store: Store | None = None,
    deadline_s: float = 60.0,
) -> IndexReport:
    """Bring the index in `index_dir` up to date with the sources.

    Raises ConfigError (a pattern matches nothing, a source named twice, another build runs) and
    StorageError (a JSONL file or archive cannot be read for now: call again, it goes on).
    """
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"sources: a name is used twice: {', '.join(names)}")
    os.makedirs(index_dir, exist_ok=True)
    own_store = store or Store()
    try:
        with _only_builder(index_dir):
            _remove_temporaries(index_dir)
            build = _Build(index_dir, counter, own_store, deadline_s, progress)
            return build.run(sources)
    finally:
        if store is None:
            own_store.close()


class _Build:
    def __init__(
        self,
        index_dir: str,
        counter: RecordCounter,
        store: Store,
        deadline_s: float,
        progress: Progress | None,
    ) -> None:
        self._index_dir = index_dir
        self._counter = counter
        self._store = store
        self._deadline_s = deadline_s
        self._progress = progress
        self._zips: dict[str, ZipArchive | ArchiveError] = {}
        self._keep: set[str] = set()
        """First part of the names of the index files in use."""
        self._done_bytes = self._total_bytes = 0
        self._num_samples = self._num_rejected = 0

    def run(self, sources: Sequence[SourceFiles]) -> IndexReport:
        listings = [
            list_source(source, self._store, deadline_s=self._deadline_s) for source in sources
        ]
        self._total_bytes = sum(f.stat.size_bytes for found in listings for f in found.jsonl)
        with ThreadPoolExecutor(_REMOTE_READERS, thread_name_prefix="index-probe") as pool:
            results = [self._source(listing, pool) for listing in listings]
        for archive in self._zips.values():
            if isinstance(archive, ZipArchive):
                archive.save_sizes()
        examples = self._write_rejected([shard for shards in results for shard in shards])
        digest = self._write_manifest(listings, results)
        self._remove_unused()
        return IndexReport(
            digest=digest,
            sources=tuple(
                _source_report(listing.files.name, shards)
                for listing, shards in zip(listings, results, strict=True)
            ),
            rejected_path=os.path.join(self._index_dir, REJECTED_NAME),
            examples=examples,
        )

    def _source(self, listing: SourceListing, pool: ThreadPoolExecutor) -> list[ShardResult]:
        results = []
        shared: ImageFinder | None = None
        self._keep |= {zip_key(file) for file in listing.roots if not file.stat.is_folder}
        for file in listing.jsonl:
            beside = zip_beside(file.url, self._store, deadline_s=self._deadline_s)
            roots = ([beside] if beside else []) + [f for f in listing.roots if f != beside]
            if beside:
                self._keep.add(zip_key(beside))
            key = shard_key(listing.files, file, roots, self._counter.fingerprint)
            name = name_below(listing.root, file.url)
            result = load_shard(self._index_dir, key, self._store, deadline_s=self._deadline_s)
            if result is None:
                if beside:
                    finder = ImageFinder([self._open(root) for root in roots])
                else:
                    shared = shared or ImageFinder([self._open(root) for root in roots])
                    finder = shared
                result = self._read_shard(listing, file, key, name, finder, pool)
            self._keep.add(key)
            self._done_bytes += file.stat.size_bytes
            self._num_samples += result.entry.num_samples
            self._num_rejected += result.entry.num_rejected
            self._report(name)
            results.append(replace(result, entry=replace(result.entry, name=name)))
        return results

    def _read_shard(
        self,
        listing: SourceListing,
        file: FoundFile,
        key: str,
        name: str,
        finder: ImageFinder,
        pool: ThreadPoolExecutor,
    ) -> ShardResult:
        builder = ShardBuilder(
            self._index_dir, key, listing.files, file, name, self._counter, finder
        )
        remote = any(local_path(found.url) is None for found in (file, *listing.roots))
        lines = builder.lines(self._store, deadline_s=self._deadline_s)
        for done in builder.read(lines, pool if remote else None):
            self._report(name, done, builder.num_samples, builder.num_rejected)
        return builder.finish()

    def _open(self, file: FoundFile) -> ZipArchive | Folder | ArchiveError:
        if file.stat.is_folder:
            return Folder(file.url, self._store, deadline_s=self._deadline_s)
        archive = self._zips.get(file.url)
        if archive is None:
            try:
                archive = ZipArchive(
                    file, self._store, self._index_dir, deadline_s=self._deadline_s
                )
            except ArchiveError as error:
                archive = ArchiveError(f"{file.url}: {error.reason}")
            self._zips[file.url] = archive
        return archive

    def _report(self, shard: str, done: int = 0, samples: int = 0, rejected: int = 0) -> None:
        if self._progress is not None:
            self._progress(
                IndexProgress(
                    done_bytes=self._done_bytes + done,
                    total_bytes=self._total_bytes,
                    num_samples=self._num_samples + samples,
                    num_rejected=self._num_rejected + rejected,
                    shard=shard,
                )
            )

    def _write_manifest(
        self, listings: list[SourceListing], results: list[list[ShardResult]]
    ) -> str:
        archives: dict[str, int] = {}
        entries: list[ArchiveEntry] = []
        sources = []
        for listing, shards in zip(listings, results, strict=True):
            numbered: list[ShardEntry] = []
            for shard in shards:
                positions = []
                for archive in shard.archives:
                    position = archives.setdefault(archive.members.name, len(entries))
                    if position == len(entries):
                        entries.append(archive)
                    positions.append(position)
                numbered.append(replace(shard.entry, archives=tuple(positions)))
            placeholder = listing.files.placeholder
            sources.append(
                SourceEntry(
                    name=listing.files.name,
                    root=listing.root,
                    placeholder=placeholder,
                    fingerprint=source_fingerprint(placeholder, tuple(numbered)),
                    shards=tuple(numbered),
                )
            )
        manifest = make_manifest(
            counter=self._counter.fingerprint, archives=tuple(entries), sources=tuple(sources)
        )
        write_manifest(self._index_dir, manifest)
        return manifest.digest

    def _write_rejected(self, shards: list[ShardResult]) -> tuple[Rejected, ...]:
        examples: list[Rejected] = []

        def write(file: BinaryIO) -> None:
            for shard in shards:
                with open(shard.rejected_path, "rb") as rejected:
                    for line in rejected:
                        file.write(line)
                        if len(examples) < _MAX_EXAMPLES:
                            examples.append(Rejected(**json.loads(line)))

        write_atomically(os.path.join(self._index_dir, REJECTED_NAME), write)
        return tuple(examples)

    def _remove_unused(self) -> None:
        for name in os.listdir(self._index_dir):
            if name.startswith(("shard-", "zip-")) and name.split(".")[0] not in self._keep:
                os.unlink(os.path.join(self._index_dir, name))


def _source_report(name: str, shards: list[ShardResult]) -> SourceReport:
    entries = [asdict(shard.entry) for shard in shards]
    sums = {
        field: sum(entry[field] for entry in entries)
        for field in ("num_samples", "num_rejected", "num_images", "text_tokens", "loss_tokens")
    }
    reused = sum(shard.reused for shard in shards)
    return SourceReport(name=name, shards_read=len(shards) - reused, shards_reused=reused, **sums)


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


def _remove_temporaries(index_dir: str) -> None:
    for name in os.listdir(index_dir):
        if name.startswith(TEMPORARY_PREFIX):
            os.unlink(os.path.join(index_dir, name))
