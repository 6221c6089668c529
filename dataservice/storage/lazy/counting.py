"""Counts blocks: reads their records by range, counts them, finds their images. For any process.

Invariants: a block's bytes are those of any other process; what cannot be read for now is a
StorageError, never a row; no row follows from a staged copy that may have been damaged since it was
made; of archives only directories and headers are read. Memory: 16 MiB of
records, or one record and those before it, and of the archives in use what their lookups take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache
from dataservice.core.packspec import ShardRef
from dataservice.errors import (
    DataError,
    DataServiceError,
    RecordError,
    StaleIndexError,
    StorageError,
)
from dataservice.storage.archives import Archives, Folder, ImageFinder, Place
from dataservice.storage.archives.lookup_files import keep_lookups
from dataservice.storage.counting import RecordCounter
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.index_rows import RowReader
from dataservice.storage.jsonl import MAX_LINE_BYTES, Line
from dataservice.storage.lazy.block import BLOCK_ROWS, encode_block
from dataservice.storage.lazy.block_file import MAX_BLOCK_BYTES
from dataservice.storage.lazy.joining import joined
from dataservice.storage.listing import FoundFile
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.packed.unpacking import PACKINGS
from dataservice.storage.recordfiles import read_record
from dataservice.storage.sources import SourceFiles

_SPAN_BYTES = 8 * 1024 * 1024
_GAP_BYTES = 16 * 1024
"""Between records, that are read with them rather than skipped."""
_BATCH_BYTES = 16 * 1024 * 1024
_KEPT_FINDERS = 64
_SEEN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlace:
    """What one block is counted from."""

    file: int
    """Number of the record file in the index, over all sources."""
    block: int
    shard: ShardRef
    """The record file."""
    offset: NDArray[np.uint64]
    """[N], of each record; Parquet: its row."""
    length: NDArray[np.uint32]
    beside: tuple[FoundFile, ...]
    """Archives of the record file's own stem."""
    unread: str = ""
    """Of which the last record stands for the rest of its file: why that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Of record files of one source with the same archives beside them."""

    reader: RowReader
    finder: _Unforgiving
    urls: list[str]
    """Of the archives and folders that its rows count in."""
    files: dict[str, FoundFile]
    """Archives by URL."""


_ReaderKey = tuple[str, tuple[FoundFile, ...], ShardRef | None]


class BlockCounter:
    """Use it from one thread; close it, then `archives`."""

    def __init__(
        self,
        sources: Sequence[SourceFiles],
        counter: RecordCounter,
        *,
        reader: ShardReader,
        archives: Archives,
        store: Store,
        deadline_s: float,
        roots: Callable[[str], Sequence[FoundFile]],
        folder: str,
    ) -> None:
        """`roots` are the image roots of a source; `folder` is that of the archives, and has their
        lookups or gets them."""
        self._sources: Mapping[str, SourceFiles] = {files.name: files for files in sources}
        self._counter = counter
        self._reader = reader
        self._archives = archives
        self._store = store
        self._deadline_s = deadline_s
        self._roots = roots
        self._roots_of: dict[str, Sequence[FoundFile]] = {}
        self._seen: dict[str, float] = {}
        """By URL of an archive: until when it need not be looked at again."""
        self._folder = folder
        self._readers: LRUCache[_ReaderKey, _Reader] = LRUCache(_KEPT_FINDERS)

    def count(self, place: BlockPlace) -> bytes:
        """The block as `block.encode_block` writes it.

        Raises StorageError where something cannot be read for now, StaleIndexError where a file is
        not what the index saw.
        """
        own = place.shard if place.shard.packing == "parquet" else None
        key = place.shard.source, place.beside, own
        found = self._readers.get(key, lambda: self._row_reader(*key))
        found.finder.used.clear()
        parts = [found.reader.read(lines) for lines in _batches(self._lines(place))]
        for number in found.finder.used:
            self._unchanged(place.shard.source, found.files.get(found.urls[number]))
        counted = encode_block(joined(parts, len(found.urls)), found.urls)
        if len(counted) > MAX_BLOCK_BYTES:
            raise DataServiceError(
                f"{len(place.offset)} records of {place.shard.source}/{place.shard.name} have so "
                f"many images that their rows take {len(counted)} bytes, over {MAX_BLOCK_BYTES}; "
                "set index: full"
            )
        return counted

    def _read(self, shard: ShardRef, offset: int, size: int) -> bytes:
        """From the origin: there is no CRC yet that would tell what became of a copy. A packed file
        cannot be read by place there, and its copy is read back when it is made."""
        read = self._reader.read if shard.packing in PACKINGS else self._reader.read_origin
        return read(shard, offset, size)

    def _row_reader(
        self, source: str, beside: tuple[FoundFile, ...], own: ShardRef | None
    ) -> _Reader:
        """`own` is the record file where it may hold images itself."""
        files = self._sources[source]
        if source not in self._roots_of:
            self._roots_of[source] = self._roots(source)
            for file in self._roots_of[source]:
                self._unchanged(source, file)
        roots = self._roots_of[source]
        for file in beside:
            self._unchanged(source, file)
        keep_lookups(self._folder, self._archives, roots)
        finder = _Unforgiving(self._archives.finder(files, beside, roots, lookups=self._folder))
        return _Reader(
            reader=RowReader(
                files,
                self._counter,
                cast(ImageFinder, finder),
                _UnforgivingEmbedded(self._read, own) if own else None,
            ),
            finder=finder,
            urls=[
                archive.url if isinstance(archive, Folder) else archive.file.url
                for archive in finder.archives
            ],
            files={file.url: file for file in (*beside, *roots) if not file.stat.is_folder},
        )

    def _unchanged(self, source: str, file: FoundFile | None) -> None:
        """StaleIndexError for an archive that is not what it was; looked at every few seconds."""
        now = time.monotonic()
        if file is None or file.stat.is_folder or self._seen.get(file.url, 0.0) > now:
            return
        try:
            stat = self._store.stat(file.url, deadline_s=self._deadline_s)
        except FileNotFoundError as error:
            raise StorageError(f"{file.url} of source {source} is not there") from error
        if (stat.size_bytes, stat.mtime_ns) != (file.stat.size_bytes, file.stat.mtime_ns):
            raise StaleIndexError(
                f"{file.url} of source {source} changed after it was indexed; run `dataservice "
                "index` again, and start the service again"
            )
        self._seen[file.url] = now + _SEEN_S

    def _lines(self, place: BlockPlace) -> Iterator[Line]:
        first = place.block * BLOCK_ROWS + 1
        offsets, lengths = place.offset.tolist(), place.length.tolist()
        spans = [(0, 0, b"")]
        for number, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            problem = ""
            data: bytes | None = None
            if length == 0:
                is_last = number == len(offsets) - 1
                problem = (is_last and place.unread) or "the row cannot be read as a record"
            elif length > MAX_LINE_BYTES:
                problem = f"the record has {length} bytes, more than the limit of {MAX_LINE_BYTES}"
            else:
                try:
                    data = self._record(place, number, offsets, lengths, spans)
                except RecordError as error:
                    problem = error.reason
            yield Line(first + number, offset, length, data, problem)

    def _record(
        self,
        place: BlockPlace,
        number: int,
        offsets: list[int],
        lengths: list[int],
        spans: list[tuple[int, int, bytes]],
    ) -> bytes:
        """The bytes of a record, from the last span that was read where they are in it."""
        offset, length = offsets[number], lengths[number]
        if place.shard.packing == "parquet":
            return read_record(self._read, place.shard, offset, length)
        begin, end, data = spans[0]
        if not begin <= offset or offset + length > end:
            begin, end = offset, _span_end(offsets, lengths, number)
            data = self._read(place.shard, begin, end - begin)
            spans[0] = begin, end, data
        return data[offset - begin : offset - begin + length]


def _span_end(offsets: list[int], lengths: list[int], number: int) -> int:
    """End of the records from `number` on that are read at once, one at least."""
    begin = offsets[number]
    end = begin + lengths[number]
    for offset, length in zip(offsets[number + 1 :], lengths[number + 1 :], strict=True):
        if offset - end > _GAP_BYTES or offset + length - begin > _SPAN_BYTES:
            break
        end = max(end, offset + length)
    return end


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Of usual records all at once, of large ones a few at a time."""
    batch: list[Line] = []
    size_bytes = 0
    for line in lines:
        batch.append(line)
        size_bytes += len(line.data or b"")
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


class _Unforgiving:
    """An ImageFinder that raises what cannot be read for now, so that no row says it is broken."""

    def __init__(self, finder: ImageFinder) -> None:
        self._finder = finder
        self.used: set[int] = set()
        """Numbers of the archives that names were found in."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def places(self, names: Sequence[str]) -> Any:
        found = _all_there(self._finder.places(names))
        self.used |= {place.archive for place in found if isinstance(place, Place)}
        return found

    def sizes(self, places: Sequence[Place]) -> Any:
        return _all_there(self._finder.sizes(places))


class _UnforgivingEmbedded(EmbeddedImages):
    """Likewise."""

    def size(self, row: int, name: str) -> tuple[int, int] | DataError | StorageError:
        (size,) = _all_there([super().size(row, name)])
        return cast(tuple[int, int] | DataError, size)


def _all_there(found: list[Any]) -> list[Any]:
    for item in found:
        if isinstance(item, StorageError):
            raise item
    return found
