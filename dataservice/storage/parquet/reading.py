"""Rows and images of Parquet shards in any order, through a cache of decoded batches.

Invariants: the cache holds at most 128 MiB of batches (and the one in use) and 8 open files in all;
rows near each other cost one decode of their batch; going back beyond what is kept decodes the row
group again from its start. Entries belong to the `read` they came through, so pass the same
callable each time: another one for the same shard (such as `ShardReader.read_origin` after damage)
begins anew and drops what the first one read. For threads; a forked child starts empty.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import ArchiveError, RecordError, StorageTimeout
from dataservice.storage.parquet.table import ParquetTable
from dataservice.storage.reads import ReadShard

_KEPT_BYTES = 128 * 1024 * 1024
_OPEN_FILES = 8
_OPEN_GROUPS = 4
_WAIT_S = 60.0

_Columns = tuple[int, tuple[str, ...]]
"""(row group, leaf columns)"""


def read_row(read: ReadShard, shard: ShardRef, row: int) -> bytes:
    """The record of a row as JSON, without the bytes of its images.

    Raises RecordError, StorageTimeout and what `read` raises.
    """
    try:
        return _cache().use(read, shard, lambda opened: opened.record(row))
    except RecordError as error:
        raise _placed(error, shard) from error


def read_image(read: ReadShard, image: ImageSpec, shard: ShardRef) -> bytes:
    """The bytes of image `image.member` ("column/n") of row `image.offset`.

    Raises ArchiveError, StorageTimeout and what `read` raises.
    """
    column, _, number = image.member.rpartition("/")
    try:
        if not number.isdecimal():
            raise RecordError(f"{image.member!r} names no image of a Parquet row")
        data = _cache().use(
            read, shard, lambda opened: opened.image(image.offset, column, int(number))
        )
        if image.size_bytes > 0 and len(data) != image.size_bytes:
            raise RecordError(f"the image has {len(data)} bytes, {image.size_bytes} in the index")
    except RecordError as error:
        raise ArchiveError(
            error.reason, source=shard.source, shard=shard.name, member=image.member
        ) from error
    return data


class _Opened:
    """A file with the row groups that are being read."""

    def __init__(self, read: ReadShard, shard: ShardRef, keep: _Batches) -> None:
        self.lock = threading.Lock()
        self.table = ParquetTable(lambda offset, size: read(shard, offset, size), shard.size_bytes)
        self._keep = keep
        self._going: OrderedDict[_Columns, tuple[int, Iterator[Any]]] = OrderedDict()
        """Number of the next batch, and those from it on."""

    def record(self, row: int) -> bytes:
        group, number = self.table.group_of(row)
        batch, at = self._batch(group, self.table.record_leaves, number)
        return self.table.as_json(batch.slice(at, 1))[0]

    def image(self, row: int, column: str, number: int) -> bytes:
        is_list = self.table.images.get(column)
        if is_list is None:
            raise RecordError(f"the Parquet file has no image column {column!r}")
        group, place = self.table.group_of(row)
        batch, at = self._batch(group, self.table.image_leaves[column], place)
        value = batch.column(column)[at]
        if is_list:
            value = value[number] if value.is_valid and number < len(value) else None
        elif number:
            value = None
        held = value.as_py() if value is not None and value.is_valid else None
        data = held["bytes"] if isinstance(held, dict) else held
        if data is None:
            raise RecordError(f"row {row} has no bytes of image {column}/{number}")
        return bytes(data)

    def _batch(self, group: int, leaves: tuple[str, ...], row: int) -> tuple[Any, int]:
        """The batch with a row of a group, and the row's place in it."""
        wanted, at = divmod(row, self.table.batch_rows(group))
        batch = self._keep.get((self, group, leaves, wanted))
        if batch is None:
            batch = self._decode(group, leaves, wanted)
        if batch is None or at >= batch.num_rows:
            raise RecordError(f"damaged Parquet file: row group {group} lacks row {row}")
        return batch, at

    def _decode(self, group: int, leaves: tuple[str, ...], wanted: int) -> Any:
        columns = group, leaves
        number, batches = self._going.pop(columns, (0, None))
        if batches is None or number > wanted:
            number, batches = 0, self.table.batches(group, leaves)
        for batch in batches:
            self._keep.add((self, group, leaves, number), batch)
            number += 1
            if number > wanted:
                self._going[columns] = number, batches
                while len(self._going) > _OPEN_GROUPS:
                    self._going.popitem(last=False)
                return batch
        return None


class _Batches:
    """Decoded batches, least recently used dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._size = 0

    def get(self, key: Any) -> Any:
        with self._lock:
            batch = self._kept.get(key)
            if batch is not None:
                self._kept.move_to_end(key)
            return batch

    def add(self, key: Any, batch: Any) -> None:
        with self._lock:
            old = self._kept.pop(key, None)
            self._size += batch.nbytes - (old.nbytes if old is not None else 0)
            self._kept[key] = batch
            while self._size > _KEPT_BYTES and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1].nbytes

    def drop(self, opened: _Opened) -> None:
        with self._lock:
            for key in [key for key in self._kept if key[0] is opened]:
                self._size -= self._kept.pop(key).nbytes


class _Cache:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._batches = _Batches()
        self._files: OrderedDict[ShardRef, tuple[ReadShard, _Opened]] = OrderedDict()

    def use(self, read: ReadShard, shard: ShardRef, call: Callable[[_Opened], bytes]) -> bytes:
        opened = self._open(read, shard)
        if not opened.lock.acquire(timeout=_WAIT_S):
            raise StorageTimeout(
                f"shard {shard.source}/{shard.name}: other reads of it did not end within "
                f"{_WAIT_S:.3g} s"
            )
        try:
            return call(opened)
        except BaseException:
            self._drop(shard, opened)
            raise
        finally:
            opened.lock.release()

    def _open(self, read: ReadShard, shard: ShardRef) -> _Opened:
        with self._lock:
            found = self._files.get(shard)
            if found is not None and found[0] == read:
                self._files.move_to_end(shard)
                return found[1]
        opened = _Opened(read, shard, self._batches)
        with self._lock:
            if found is not None and self._files.get(shard) is found:
                self._batches.drop(found[1])
            self._files[shard] = read, opened
            self._files.move_to_end(shard)
            while len(self._files) > _OPEN_FILES:
                self._batches.drop(self._files.popitem(last=False)[1][1])
        return opened

    def _drop(self, shard: ShardRef, opened: _Opened) -> None:
        with self._lock:
            found = self._files.get(shard)
            if found is not None and found[1] is opened:
                del self._files[shard]
        self._batches.drop(opened)


_made = _Cache()


def _cache() -> _Cache:
    global _made
    if _made.pid != os.getpid():
        _made = _Cache()
    return _made


def _placed(error: RecordError, shard: ShardRef) -> RecordError:
    return RecordError(error.reason, source=shard.source, shard=shard.name)
