"""The index's files: Arrow IPC tables that are memory-mapped when read, and how they are written.

Invariants: a file appears under its name complete or not at all (temporary name, fsync, rename,
fsync of the folder); a table is one record batch, so that a column is one array over the mapped
file and opening costs no copy; columns have no nulls.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.errors import StaleIndexError

TEMPORARY_PREFIX = ".tmp-"

SAMPLES = pa.schema(
    [
        ("offset", pa.uint64()),
        ("length", pa.uint32()),
        ("crc32", pa.uint32()),
        ("text_tokens", pa.uint32()),
        ("loss_tokens", pa.uint32()),
        ("image_start", pa.uint32()),  # first row in the shard's images table
        ("num_images", pa.uint16()),
        ("layout", pa.uint8()),  # position in records.LAYOUTS
        # not of this row: numbers of the rows without images, then of those with images
        ("by_kind", pa.uint32()),
    ]
)
IMAGES = pa.schema(
    [
        ("archive", pa.uint32()),  # position in the shard's list of archives
        ("member", pa.uint32()),  # row in that archive's members table
        ("width", pa.uint32()),
        ("height", pa.uint32()),
        ("text_before", pa.uint32()),  # text tokens before the image and its markup
        ("markup", pa.uint8()),  # text tokens that are its start and end
    ]
)
MEMBERS = pa.schema(
    [
        ("offset", pa.uint64()),
        ("stored_bytes", pa.uint64()),
        ("size_bytes", pa.uint64()),
        ("method", pa.int16()),  # -1: a plain file of a folder
        ("crc32", pa.uint32()),  # 0 for a plain file
        ("mtime_ns", pa.int64()),  # 0 in a zip
        ("problem", pa.uint8()),  # zips.OK or why it cannot be read
        ("name", pa.large_string()),
    ]
)
SIZES = pa.schema([("width", pa.uint32()), ("height", pa.uint32())])  # 0: not looked at yet


def write_atomically(path: str, write: Callable[[BinaryIO], None]) -> int:
    """Give the file its name only once `write` is done and on disk; returns its size in bytes."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{name}")
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


def sync_folder(folder: str) -> None:
    """Make names in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def to_arrays(schema: Any, columns: Mapping[str, Sequence[Any] | NDArray[Any] | Any]) -> list[Any]:
    """Arrow arrays of the schema's columns, in its order; numpy arrays are not copied."""
    return [
        value if isinstance(value, pa.Array) else pa.array(value, type=kind)
        for kind, value in ((field.type, columns[field.name]) for field in schema)
    ]


def write_table(path: str, schema: Any, arrays: list[Any]) -> int:
    """Write one record batch; returns the file's size in bytes."""
    batch = pa.record_batch(arrays, schema=schema)

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
            writer.write_batch(batch)

    return write_atomically(path, write)


def digest_arrays(arrays: Sequence[Any]) -> str:
    """Hex SHA-256 over the columns' types and values."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.type}:{len(array)};".encode())
        if not len(array):
            continue
        *_, values = array.buffers()
        if pa.types.is_large_string(array.type):
            ends = memoryview(array.buffers()[1])[: 8 * len(array) + 8]
            digest.update(ends)
            length = int.from_bytes(ends[-8:], "little")
            digest.update(memoryview(values)[:length] if values is not None else b"")
        else:
            digest.update(memoryview(values)[: len(array) * array.type.bit_width // 8])
    return digest.hexdigest()


class Table:
    """A mapped table; `columns` are read-only arrays over the file (strings stay in Arrow)."""

    def __init__(self, path: str, schema: Any, *, size_bytes: int | None = None) -> None:
        try:
            if size_bytes is not None and os.path.getsize(path) != size_bytes:
                raise StaleIndexError(
                    f"{path} has {os.path.getsize(path)} bytes, {size_bytes} when it was written; "
                    "delete the index folder and run `dataservice index` again"
                )
            with pa.memory_map(path) as source, pa.ipc.open_file(source) as reader:
                if reader.schema != schema or reader.num_record_batches != 1:
                    raise StaleIndexError(f"{path} is not a table of this index version")
                self._batch = reader.get_batch(0)
        except (OSError, pa.ArrowException) as error:
            raise StaleIndexError(
                f"{path} cannot be read ({error}); run `dataservice index` again, "
                "and restart what used the old index"
            ) from error
        self.num_rows: int = self._batch.num_rows
        self.columns: dict[str, NDArray[Any]] = {
            field.name: column.to_numpy(zero_copy_only=True)
            for field, column in zip(schema, self._batch.columns, strict=True)
            if not pa.types.is_large_string(field.type)
        }

    def strings(self, name: str) -> Any:
        """An Arrow string column."""
        return self._batch.column(name)


def gather_ranges(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """starts[0], starts[0]+1, ... for counts[0] values, then from starts[1], and so on."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    if not len(ends):
        return ends
    first = starts.astype(np.int64) - (ends - counts)
    return np.repeat(first, counts) + np.arange(ends[-1], dtype=np.int64)
