"""The index's files: Arrow IPC tables of integer columns that are memory-mapped when read.

Invariants: a file appears under its name complete or not at all (temporary name, fsync, rename,
fsync of the folder); a column that a line or another column gives is not stored, any other has the
narrowest type that holds it; a table is one record batch, so that a column is one array over the
mapped file and opening costs no copy; columns have no nulls.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.errors import StaleIndexError
from dataservice.storage.spool import Spool, joined

TEMPORARY_PREFIX = ".tmp-"

Ints = NDArray[np.int64]

SAMPLES = (
    "offset",
    "length",
    "crc32",
    "text_tokens",  # 0: a rejected record, which has no images either
    "loss_tokens",
    "image_start",  # first row in the shard's images table
    "num_images",
    "layout",  # position in records.LAYOUTS
    "num_docs",  # documents; of a rejected record 1
    # not of this row: numbers of the rows without images, of those with, then of those rejected
    "by_kind",
)
IMAGES = (
    "archive",  # position in the shard's list of archives
    "member",  # row in that archive's members table, or the image's number in its record
    "width",
    "height",
    "text_before",  # text tokens before the image and its markup
    "markup",  # text tokens that are its start and end
    "probed",  # 1: the picture's header says width and height, 0: the record does
)
MEMBERS = (
    "offset",
    "stored_bytes",
    "size_bytes",
    "method",  # as `packspec.ImageSpec.method`
    "crc32",  # 0 where there is none
    "mtime_ns",  # 0 in an archive
    "problem",  # 0, or why it cannot be read
)

_NARROW = tuple(np.dtype(name) for name in ("u1", "u2", "u4", "i2", "i4"))
_CHUNK_ROWS = 1 << 20
_META = b"columns"


class Column(Protocol):
    """Integers by row number; values are never copied as a whole."""

    def take(self, rows: Ints) -> Ints: ...

    def item(self, row: int) -> int: ...

    def slice(self, start: int, stop: int) -> Ints: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """`base + step * row`."""

    base: int
    step: int

    def take(self, rows: Ints) -> Ints:
        if self.step == 0:
            return np.full(len(rows), self.base, dtype=np.int64)
        return rows.astype(np.int64) * self.step + self.base

    def item(self, row: int) -> int:
        return self.base + self.step * row

    def slice(self, start: int, stop: int) -> Ints:
        return self.take(np.arange(start, stop, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Over the mapped file."""

    values: NDArray[Any]

    def take(self, rows: Ints) -> Ints:
        return self.values[rows].astype(np.int64)

    def item(self, row: int) -> int:
        return int(self.values.item(row))

    def slice(self, start: int, stop: int) -> Ints:
        return self.values[start:stop].astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """`low + high << 32`, over the mapped file."""

    low: Column
    high: Column

    def take(self, rows: Ints) -> Ints:
        return self.low.take(rows) + (self.high.take(rows) << 32)

    def item(self, row: int) -> int:
        return self.low.item(row) + (self.high.item(row) << 32)

    def slice(self, start: int, stop: int) -> Ints:
        return self.low.slice(start, stop) + (self.high.slice(start, stop) << 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    size_bytes: int
    digest: str
    """Hex SHA-256 of names and values."""


def write_atomically(path: str, write: Callable[[BinaryIO], None]) -> int:
    """Give the file its name only once `write` is done and on disk; returns its size in bytes."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}-{name}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        os.rename(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    sync_folder(folder)
    return size_bytes


def write_bytes(path: str, data: bytes) -> None:
    """A whole file, likewise."""
    write_atomically(path, lambda file: file.writelines([data]))


def sync_folder(folder: str) -> None:
    """Make names in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_table(
    path: str,
    names: Sequence[str],
    columns: Mapping[str, NDArray[Any]],
    *,
    extra: Mapping[str, int | str] | None = None,
) -> Written:
    """Write integer columns of one length; `columns` may be over mapped files."""
    forms: dict[str, Any] = {}
    stored: dict[str, NDArray[Any]] = {}
    num_rows = len(columns[names[0]])
    for number, name in enumerate(names):
        values = columns[name]
        if len(values) != num_rows:
            raise ValueError(f"column {name} has {len(values)} rows, not {num_rows}")
        line = _as_line(values)
        twin = next((other for other in names[:number] if _equal(columns[other], values)), None)
        if line is not None:
            forms[name] = [line.base, line.step]
        elif twin is not None:
            forms[name] = twin
        else:
            stored |= _narrowed(name, values, os.path.dirname(path))
    meta = json.dumps({"rows": num_rows, "forms": forms, **(extra or {})}, sort_keys=True).encode()
    digest = hashlib.sha256(meta)
    for name, values in stored.items():
        digest.update(f"{name}:{values.dtype.str};".encode())
        digest.update(values.view(np.uint8).data if len(values) else b"")
    arrays = [pa.array(values) for values in stored.values()]
    schema = pa.schema([(n, a.type) for n, a in zip(stored, arrays, strict=True)], {_META: meta})
    return Written(size_bytes=write_batch(path, schema, arrays), digest=digest.hexdigest())


def write_batch(path: str, schema: Any, arrays: list[Any]) -> int:
    """Write one record batch; returns the file's size in bytes."""
    batch = pa.record_batch(arrays, schema=schema)

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
            writer.write_batch(batch)

    return write_atomically(path, write)


def open_batch(path: str, *, size_bytes: int | None = None) -> Any:
    """The record batch of a mapped file. Raises StaleIndexError."""
    try:
        if size_bytes is not None and os.path.getsize(path) != size_bytes:
            raise StaleIndexError(
                f"{path} has {os.path.getsize(path)} bytes, {size_bytes} when it was written; "
                "delete the index folder and run `dataservice index` again"
            )
        with pa.memory_map(path) as source, pa.ipc.open_file(source) as reader:
            if reader.num_record_batches != 1:
                raise StaleIndexError(f"{path} is not a table of this index version")
            return reader.get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise StaleIndexError(
            f"{path} cannot be read ({error}); if it is there, delete it; run `dataservice index` "
            "again, and restart what used the old index"
        ) from error


class Table:
    """A mapped table: `columns[name]` are read-only."""

    def __init__(self, path: str, names: Sequence[str], *, size_bytes: int | None = None) -> None:
        batch = open_batch(path, size_bytes=size_bytes)
        stored = {
            field.name: column.to_numpy(zero_copy_only=True)
            for field, column in zip(batch.schema, batch.columns, strict=True)
        }
        try:
            meta: dict[str, Any] = json.loads(batch.schema.metadata[_META])
            self.meta = meta
            self.num_rows: int = meta["rows"]
            self.columns: dict[str, Column] = {}
            for name in names:
                self.columns[name] = self._column(name, meta["forms"].get(name), stored)
        except (KeyError, TypeError, ValueError) as error:
            raise StaleIndexError(f"{path} is not a table of this index version") from error

    def _column(self, name: str, form: Any, stored: Mapping[str, NDArray[Any]]) -> Column:
        if isinstance(form, str):
            return self.columns[form]
        if form is not None:
            base, step = form
            return Line(base=base, step=step)
        if name + ".low" in stored:
            return Wide(
                low=Stored(values=stored[name + ".low"]),
                high=Stored(values=stored[name + ".high"]),
            )
        return Stored(values=stored[name])


def chunks_of(num_rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the parts that long columns are gone through in."""
    for start in range(0, num_rows, _CHUNK_ROWS):
        yield start, min(start + _CHUNK_ROWS, num_rows)


def _as_line(values: NDArray[Any]) -> Line | None:
    if not len(values):
        return Line(base=0, step=0)
    base = int(values[0])
    step = int(values[1]) - base if len(values) > 1 else 0
    if abs(step) >= 1 << 62 or abs(base + step * len(values)) >= 1 << 62:
        return None
    for start, stop in chunks_of(len(values)):
        # Most columns are told from a line by their first rows.
        for end in (min(start + 64, stop), stop):
            rows = np.arange(start, end, dtype=np.int64)
            if not np.array_equal(values[start:end], rows * step + base):
                return None
    return Line(base=base, step=step)


def _equal(some: NDArray[Any], others: NDArray[Any]) -> bool:
    return all(
        np.array_equal(some[start:end], others[start:end])
        for start, stop in chunks_of(len(some))
        for end in (min(start + 64, stop), stop)
    )


def _narrowed(name: str, values: NDArray[Any], folder: str) -> dict[str, NDArray[Any]]:
    """What is large goes to a file in `folder`, see `spool`."""
    least, most = int(values.min()), int(values.max())
    for kind in _NARROW:
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return {name: joined(kind.str, folder, [values])}
    if least < 0:
        return {name: joined("i8", folder, [values])}
    low, high = Spool("u4", folder), Spool("u4", folder)
    for start, stop in chunks_of(len(values)):
        part = values[start:stop].astype(np.int64)
        low.add(part & 0xFFFFFFFF)
        high.add(part >> 32)
    return {name + ".low": low.finish(), **_narrowed(name + ".high", high.finish(), folder)}


def gather_ranges(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0]+1, ... for counts[0] values, then from starts[1], and so on."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    if not len(ends):
        return ends
    first = starts.astype(np.int64) - (ends - counts)
    return np.repeat(first, counts) + np.arange(ends[-1], dtype=np.int64)
