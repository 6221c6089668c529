"""Messages about blocks of records that are counted while the service runs (a lazy index).

Invariants: as in wire.messages, of which these are a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.wire.shards import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A file or folder, as it was when the index was opened."""

    url: str
    size_bytes: int
    mtime_ns: int
    folder: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CountBlock:
    """One block: some records of a record file that follow each other, to be counted."""

    file: int
    """Number of the record file in the index, over all sources; with `block` what names the job."""
    block: int
    shard: Shard
    """The record file."""
    offsets: bytes
    """By record a little-endian uint64, in bytes (Parquet: rows)."""
    lengths: bytes
    """By record a little-endian uint32."""
    beside: tuple[Found, ...]
    """Archives of the record file's own stem."""
    unread: str = ""
    """Where the last record stands for the rest of its file: why that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedBlock:
    """A counted block, or why it is none: then `rows` is empty."""

    file: int
    block: int
    rows: bytes = b""
    """As storage.lazy.block encodes them."""
    reason: str = ""
    fatal: bool = False
    """True when nobody can do better, as with a file that changed after its offsets were found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportCounts:
    worker_id: str
    lease: int
    blocks: tuple[CountedBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GetRoots:
    """Where the images of a source are looked up."""

    worker_id: str
    lease: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Roots:
    roots: tuple[Found, ...]
    """In order."""
