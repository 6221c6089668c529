"""What the parts of a build share: how a pack's shards are read, and how its holes are named.

Invariants: a hole key names the sample and what of it is lost; a read of a damaged staged copy is
repeated at the origin, which decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from dataservice.core.packspec import ShardRef
from dataservice.errors import ArchiveError, RecordError
from dataservice.storage.reads import ReadShard

T = TypeVar("T")


class Reader(Protocol):
    """`storage.objects.ShardReader`, or a fake."""

    def read(self, shard: ShardRef, offset: int, size: int) -> bytes: ...

    def read_cached(self, shard: ShardRef, offset: int, size: int) -> bytes | None: ...

    @property
    def used_copies(self) -> bool: ...

    def read_origin(self, shard: ShardRef, offset: int, size: int) -> bytes: ...

    def drop_copy(self, shard: ShardRef) -> None: ...


def hole_key(sample_key: str, image: int) -> str:
    return f"{sample_key}#{image}"


def record_key(sample_key: str) -> str:
    """Hole key of a sample whose record itself cannot be had."""
    return f"{sample_key}#record"


class NotAtHand(Exception):
    """It takes a read that may have to wait."""


def at_hand(reader: Reader) -> ReadShard:
    """Reads what can be had at once, so that no other thread need be woken; raises NotAtHand."""

    def read(shard: ShardRef, offset: int, size: int) -> bytes:
        data = reader.read_cached(shard, offset, size)
        if data is None:
            raise NotAtHand
        return data

    return read


def undamaged(reader: Reader, shard: ShardRef, get: Callable[[ReadShard], T]) -> T:
    """What `get` reads; when a staged copy turns out damaged, the origin decides."""
    try:
        return get(reader.read)
    except (ArchiveError, RecordError):
        if not reader.used_copies:
            raise
        data = get(reader.read_origin)
    reader.drop_copy(shard)
    return data
