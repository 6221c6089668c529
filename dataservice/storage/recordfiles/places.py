"""A record by its place, whatever its container.

Invariants: the bytes are those that a scan of the file gave for that place.
"""

from __future__ import annotations

from dataservice.core.packspec import ShardRef
from dataservice.storage import parquet
from dataservice.storage.reads import ReadShard


def read_record(read: ReadShard, shard: ShardRef, offset: int, length: int) -> bytes:
    """The record at `offset` (in a Parquet file: of row `offset`, as JSON without image bytes).

    Raises what `read` raises, and RecordError where a file is damaged.
    """
    if shard.packing == "parquet":
        return parquet.read_row(read, shard, offset)
    return read(shard, offset, length)
