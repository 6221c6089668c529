"""The pieces of work that building an index falls into, and what does one in any process.

Invariants: a task and its result are plain values that travel between machines; a task that was
done leaves files that make it unnecessary; tasks may run at the same time, in any order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dataservice.core.packspec import ShardRef
from dataservice.errors import StaleIndexError, StorageError
from dataservice.storage.archives import Archive, Archives, Folder
from dataservice.storage.counting import RecordCounter
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.index_folder import name_by_digest
from dataservice.storage.index_rows import RowReader
from dataservice.storage.index_shard import ShardBuilder, ShardResult
from dataservice.storage.listing import FoundFile
from dataservice.storage.manifest import INDEX_VERSION, ArchiveEntry, ShardEntry
from dataservice.storage.objects import Store
from dataservice.storage.recordfiles import count_records, packing_of
from dataservice.storage.sources import SourceFiles
from dataservice.storage.tables import IMAGES, Table, chunks_of, write_bytes
from dataservice.storage.taking import Taken

COUNT_PREFIX = "records-"

CounterFactory = Callable[[], RecordCounter]
"""Something that other processes can call, too: a class, a function, a `functools.partial`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """What all tasks of a build share."""

    index_dir: str
    scratch_dir: str
    """With files that live as long as the build."""
    counter: CounterFactory
    deadline_s: float
    roots: Mapping[str, tuple[FoundFile, ...]] = field(default_factory=dict)
    """Image roots by source, for the tasks that read record files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveTask:
    """Read the directory of an image root. Result: None."""

    file: FoundFile


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTask:
    """Count the records of a file, for a source of which only some are taken. Result: int."""

    file: FoundFile
    path: str
    """Where the number is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """Read a record file. Result: ShardResult."""

    key: str
    files: SourceFiles
    file: FoundFile
    name: str
    beside: tuple[FoundFile, ...]
    taken: Taken | None
    """None: all records."""
    before: ShardEntry | None
    """What an earlier build made of the file, to take picture sizes from."""
    archives_before: tuple[ArchiveEntry, ...]


Task = ArchiveTask | CountTask | ShardTask
Result = ShardResult | int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """How far a task is."""

    number: int
    """Of the task."""
    done_bytes: int
    num_samples: int
    num_rejected: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    number: int
    result: Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The task's file cannot be read for now; nothing is wrong with other tasks."""

    number: int
    error: StorageError


State = Running | Done | Failed


class TaskRunner:
    """Does tasks one after the other; close it when done."""

    def __init__(self, context: BuildContext, store: Store | None = None) -> None:
        self._context = context
        self._own_store = Store() if store is None else None
        self._store: Store = store or self._own_store  # type: ignore[assignment]
        self._archives = Archives(self._store, context.index_dir, deadline_s=context.deadline_s)
        self._counter: RecordCounter | None = None

    def run(self, number: int, task: Task) -> Iterator[Running | Done]:
        """Raises StorageError when a file cannot be read for now."""
        if isinstance(task, ShardTask):
            yield from self._shard(number, task)
        elif isinstance(task, CountTask):
            yield Done(number=number, result=self._count(task))
        else:
            self._archives.root(task.file)
            yield Done(number=number, result=None)

    def close(self) -> None:
        self._archives.close()
        if self._own_store:
            self._own_store.close()

    def _shard(self, number: int, task: ShardTask) -> Iterator[Running | Done]:
        context = self._context
        finder = self._archives.finder(
            task.files, task.beside, context.roots[task.files.name], lookups=context.scratch_dir
        )
        if task.before:
            self._learn_sizes(task, finder.archives)
        if self._counter is None:
            self._counter = context.counter()
        identities = [self._archives.identity(file) for file in task.beside]
        builder = ShardBuilder(
            context.index_dir,
            task.key,
            task.files,
            task.file,
            finder,
            [identity for identity in identities if identity],
        )
        rows = RowReader(task.files, self._counter, finder, self._embedded(task))
        try:
            for done in builder.read(self._store, rows, task.taken, deadline_s=context.deadline_s):
                yield Running(
                    number=number,
                    done_bytes=done,
                    num_samples=builder.num_samples,
                    num_rejected=builder.num_rejected,
                )
            yield Done(number=number, result=builder.finish(task.name))
        finally:
            builder.close()

    def _embedded(self, task: ShardTask) -> EmbeddedImages | None:
        """The images in the record file itself, if it is one that holds them as columns."""
        if packing_of(task.file.url) != "parquet":
            return None
        shard = task.file.shard(task.files.name, task.name, "parquet")
        return EmbeddedImages(self._read_exactly, shard)

    def _read_exactly(self, shard: ShardRef, offset: int, size: int) -> bytes:
        deadline_s = self._context.deadline_s
        data = self._store.read(shard.url, offset, size, deadline_s=deadline_s)
        if len(data) != size:
            raise StorageError(f"{shard.url} ends at {offset + len(data)}, not {offset + size}")
        return data

    def _learn_sizes(self, task: ShardTask, archives: list[Archive | Folder]) -> None:
        """Of pictures whose headers an earlier build read for this file."""
        assert task.before is not None
        now = {f"{a.key}.members.arrow": a for a in archives if isinstance(a, Archive)}
        known = [
            (number, now[entry.members.name])
            for number, entry in enumerate(task.archives_before)
            if entry.members and entry.members.name in now
        ]
        if not known:
            return
        path = os.path.join(self._context.index_dir, task.before.images.name)
        try:
            table = Table(path, IMAGES, size_bytes=task.before.images.size_bytes)
        except StaleIndexError:
            return
        for start, stop in chunks_of(table.num_rows):
            values = {name: table.columns[name].slice(start, stop) for name in IMAGES}
            for number, archive in known:
                rows = np.flatnonzero((values["archive"] == number) & (values["probed"] == 1))
                archive.learn_sizes(
                    values["member"][rows], values["width"][rows], values["height"][rows]
                )

    def _count(self, task: CountTask) -> int:
        count = count_records(
            self._store,
            task.file.url,
            task.file.stat.size_bytes,
            deadline_s=self._context.deadline_s,
        )
        data = json.dumps({"records": count}).encode()
        write_bytes(task.path, data)
        return count


def count_key(file: FoundFile) -> str:
    """Names what a CountTask keeps."""
    text = f"{INDEX_VERSION}\0{file.url}\0{file.stat.size_bytes}\0{file.stat.mtime_ns}"
    return name_by_digest(COUNT_PREFIX, text)


def kept_count(path: str) -> int | None:
    """What an earlier CountTask found."""
    try:
        with open(path, "rb") as file:
            return int(json.load(file)["records"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None
