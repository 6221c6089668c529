"""Images whose bytes stand in the rows of a Parquet file, as the index looks at them.

Invariants: an image is one of a column that holds images; its bytes are read for its header, once.
"""

from __future__ import annotations

from functools import cached_property

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import DataError, StorageError
from dataservice.storage import parquet
from dataservice.storage.members import IN_PARQUET
from dataservice.storage.probe import probe
from dataservice.storage.reads import ReadShard


class EmbeddedImages:
    """Of one file; `read` must be the same callable all the time."""

    def __init__(self, read: ReadShard, shard: ShardRef) -> None:
        self._read = read
        self._shard = shard

    def __contains__(self, name: str) -> bool:
        """Whether an image of that name stands in the file. Raises RecordError, StorageError."""
        column, number = self.split(name)
        return number >= 0 and column in self._columns

    def split(self, name: str) -> tuple[str, int]:
        """(column, number in the row) of "column/number"; the number is -1 in any other name."""
        column, _, number = name.rpartition("/")
        return column, int(number) if number.isdecimal() and len(number) < 10 else -1

    def size(self, row: int, name: str) -> tuple[int, int] | DataError | StorageError:
        """Upright width and height of image `name` of a row, by its header."""
        image = ImageSpec(
            shard=0,
            member=name,
            offset=row,
            stored_bytes=0,
            size_bytes=0,
            method=IN_PARQUET,
            crc32=-1,
            width=0,
            height=0,
            target_width=0,
            target_height=0,
        )
        try:
            data = parquet.read_image(self._read, image, self._shard)
            header = probe(lambda offset, size: data[offset : offset + size], len(data))
        except (DataError, StorageError) as error:
            return error
        return header.width, header.height

    @cached_property
    def _columns(self) -> frozenset[str]:
        table = parquet.ParquetTable(
            lambda offset, size: self._read(self._shard, offset, size), self._shard.size_bytes
        )
        return frozenset(table.images)
