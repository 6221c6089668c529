"""One Parquet file by positioned reads: its rows as JSON records, and the images in them.

Invariants: the images of a record are not read with it: in its JSON they are names "column/n", n
from 0; a binary column that holds no images is not read, nor is one of more than 64 KiB a row (in
the first 16 rows) that no record layout uses; what is not as it must be is a RecordError. Columns
are decoded in batches of about 8 MiB, row group by row group, forward; memory holds one batch and
a page, whose size the file's writer chose, of each column in use. For one thread.

Image columns, as FineVision and LLaVA-OneVision have them: a struct {bytes: binary, path: string},
or a list of such structs; or, as img2dataset has them, bytes alone in a column of a usual name,
such as "jpg". The only image column of a file is its records' field `image`, whatever its name.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from isal import isal_zlib

from dataservice.errors import RecordError
from dataservice.storage.parquet.ranged_file import RangedFile
from dataservice.storage.reads import ReadAt

_BATCH_BYTES = 8 * 1024 * 1024
_MAX_BATCH_ROWS = 1024
_BUFFER_BYTES = 1024 * 1024
_HUGE_ROW_BYTES = 64 * 1024
_SAMPLE_ROWS = 16
_MAX_FOOTER_BYTES = 256 * 1024 * 1024
_USED = frozenset(
    "id texts text conversations messages caption images image text_list image_info metadata"
    " width height width_list height_list query response instruction input output system".split()
)
"""Columns that are read however large they are."""
_BARE_NAMES = frozenset("image images img jpg jpeg png webp image_bytes".split())
"""Columns whose bytes are images."""


class ParquetTable:
    def __init__(self, read: ReadAt, size_bytes: int) -> None:
        """Reads the footer. Raises RecordError, and what `read` raises."""
        self.footer_crc32 = _footer_crc32(read, size_bytes)
        with _damage("the footer"):
            self._file = pq.ParquetFile(
                pa.PythonFile(RangedFile(read, size_bytes), mode="r"),
                pre_buffer=False,
                buffer_size=_BUFFER_BYTES,
                thrift_string_size_limit=_MAX_FOOTER_BYTES,
                thrift_container_size_limit=4_000_000,
            )
            metadata = self._file.metadata
            schema = self._file.schema_arrow
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            rows = [group.num_rows for group in groups]
            self._group_bytes = [group.total_byte_size for group in groups]
        if len(set(schema.names)) < len(schema.names):
            raise RecordError("two columns of the Parquet file have the same name")
        if min(rows, default=0) < 0:
            raise RecordError("damaged Parquet file: a row group of fewer than no rows")
        self._group_starts: list[int] = [0, *accumulate(rows)]
        self.images: dict[str, bool] = {
            field.name: pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
            for field in schema
            if _holds_images(field.type)
            or (field.name in _BARE_NAMES and _is_binary(_item_type(field.type)))
        }
        """Image columns, and whether they hold a list a row."""
        self.image_leaves = {name: self._leaves(name) for name in self.images}
        named = {"image", "images"} & set(schema.names)
        self._only_image = next(iter(self.images)) if len(self.images) == 1 and not named else ""

    @property
    def num_rows(self) -> int:
        return int(self._group_starts[-1])

    @property
    def num_groups(self) -> int:
        return len(self._group_starts) - 1

    def group_of(self, row: int) -> tuple[int, int]:
        """The row group of a row, and the row's number in it. Raises RecordError."""
        if not 0 <= row < self.num_rows:
            raise RecordError(f"row {row} of {self.num_rows} rows")
        group = bisect.bisect_right(self._group_starts, row) - 1
        return group, row - self._group_starts[group]

    def batch_rows(self, group: int) -> int:
        """Rows of a batch. All columns count: Arrow's own sizes by column are not safe to ask for
        in a damaged file."""
        rows = self._group_starts[group + 1] - self._group_starts[group]
        mean = self._group_bytes[group] // max(rows, 1)
        return int(min(max(_BATCH_BYTES // max(mean, 1), 1), _MAX_BATCH_ROWS))

    def batches(
        self, group: int, leaves: tuple[str, ...], batch_rows: int | None = None
    ) -> Iterator[Any]:
        """Record batches of a row group, all but the last of `self.batch_rows(group)` rows."""
        with _damage(f"row group {group}"):
            batches = self._file.iter_batches(
                batch_rows or self.batch_rows(group),
                row_groups=[group],
                columns=list(leaves),
                use_threads=False,
            )
        while True:
            with _damage(f"row group {group}"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def records(self) -> Iterator[bytes | RecordError]:
        """All rows in order; a RecordError in the place of one that cannot be a record."""
        for group in range(self.num_groups):
            left = self._group_starts[group + 1] - self._group_starts[group]
            for batch in self.batches(group, self.record_leaves):
                left -= batch.num_rows
                try:
                    yield from self.as_json(batch)
                except RecordError:
                    yield from (self._row_or_reason(batch, at) for at in range(batch.num_rows))
            if left:
                raise RecordError(f"damaged Parquet file: row group {group} lacks {left} rows")

    def as_json(self, batch: Any) -> list[bytes]:
        """The records of a batch of the record columns."""
        with _damage("a value"):
            rows = _without_times(batch).to_pylist()
        for row in rows:
            for name, is_list in self.images.items():
                row[name] = _image_names(name, row[name], is_list)
            if self._only_image:
                row["image"] = row[self._only_image]
        return [_dumps(row) for row in rows]

    def _row_or_reason(self, batch: Any, at: int) -> bytes | RecordError:
        try:
            return self.as_json(batch.slice(at, 1))[0]
        except RecordError as error:
            return error

    @cached_property
    def record_leaves(self) -> tuple[str, ...]:
        """The leaf columns that records are made of. Raises RecordError."""
        chosen: dict[str, tuple[str, ...]] = {}
        optional: list[str] = []
        for field in self._file.schema_arrow:
            leaves = self._leaves(field.name)
            if field.name in self.images:  # a path tells whether there is an image
                paths = tuple(leaf for leaf in leaves if leaf.endswith(".path"))
                chosen[field.name] = paths or leaves
            elif _is_json(field.type):
                chosen[field.name] = leaves
                optional += [field.name] * (field.name not in _USED)
        for name in self._huge(tuple(leaf for other in optional for leaf in chosen[other])):
            del chosen[name]
        if not chosen:
            raise RecordError("the Parquet file has no column that a record can be made of")
        return tuple(leaf for leaves in chosen.values() for leaf in leaves)

    def _huge(self, leaves: tuple[str, ...]) -> list[str]:
        """Those of these columns that have more than 64 KiB a row, by the first rows."""
        for group in range(self.num_groups if leaves else 0):
            for batch in self.batches(group, leaves, _SAMPLE_ROWS):
                most = _HUGE_ROW_BYTES * batch.num_rows
                return [n for n in batch.schema.names if batch.column(n).nbytes > most]
        return []

    def _leaves(self, name: str) -> tuple[str, ...]:
        return tuple(self._paths_below.get(name, ()))

    @cached_property
    def _paths_below(self) -> dict[str, list[str]]:
        """Paths of leaf columns by what they begin with, up to a dot or their end."""
        below: dict[str, list[str]] = {}
        for column in self._file.schema:
            path = column.path
            dot = path.find(".")
            while dot >= 0:
                below.setdefault(path[:dot], []).append(path)
                dot = path.find(".", dot + 1)
            below.setdefault(path, []).append(path)
        return below


@contextmanager
def _damage(where: str) -> Iterator[None]:
    """What Arrow says of a bad file becomes RecordError; what the reads raise is passed on."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise RecordError(f"damaged Parquet file: {where}: {error}") from error
    except OSError as error:
        if type(error) is not OSError:
            raise
        raise RecordError(f"damaged Parquet file: {where}: {error}") from error


def _footer_crc32(read: ReadAt, size_bytes: int) -> int:
    tail = read(max(size_bytes - 8, 0), min(size_bytes, 8))
    if len(tail) < 8 or tail[4:] != b"PAR1":
        reason = "encrypted" if tail[4:] == b"PARE" else "not a Parquet file, or cut off"
        raise RecordError(f"{reason}: it does not end with a Parquet footer")
    (length,) = struct.unpack("<I", tail[:4])
    if length > min(size_bytes - 12, _MAX_FOOTER_BYTES):
        raise RecordError(f"damaged Parquet file: a footer of {length} bytes")
    return isal_zlib.crc32(read(size_bytes - 8 - length, length + 8))


def _item_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind


def _holds_images(kind: Any) -> bool:
    kind = _item_type(kind)
    if not pa.types.is_struct(kind):
        return False
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return set(fields) <= {"bytes", "path"} and "bytes" in fields and _is_binary(fields["bytes"])


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_json(kind: Any) -> bool:
    """No bytes anywhere in it."""
    if pa.types.is_nested(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    return not (_is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _without_times(batch: Any) -> Any:
    """Dates and times as the integers that they are stored as: Python has not all of them."""
    for number, field in enumerate(batch.schema):
        kind = _untimed(field.type)
        if kind != field.type:
            column = batch.column(number).cast(kind)
            batch = batch.set_column(number, pa.field(field.name, kind), column)
    return batch


def _untimed(kind: Any) -> Any:
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(i).with_type(_untimed(kind.field(i).type)) for i in range(kind.num_fields)]
        )
    if pa.types.is_map(kind):
        return pa.map_(_untimed(kind.key_type), _untimed(kind.item_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_untimed(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_untimed(kind.value_type)))
    return kind


def _image_names(column: str, value: Any, is_list: bool) -> Any:
    if value is None:
        return None
    if is_list:
        return [None if v is None else f"{column}/{n}" for n, v in enumerate(value)]
    return f"{column}/0"


def _dumps(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS)
    except (orjson.JSONEncodeError, TypeError) as error:
        raise RecordError(f"damaged Parquet file: a value: {error}") from error
