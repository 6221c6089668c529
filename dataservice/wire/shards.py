"""A shard as messages name it.

Invariants: as in wire.messages, of which this is a part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The fields of `core.packspec.ShardRef`."""

    source: str
    name: str
    url: str
    size_bytes: int
    mtime_ns: int
    packing: str = ""
    unpacked_bytes: int = 0
