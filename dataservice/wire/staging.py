"""Messages between a node's stager and the coordinator.

Invariants: as in wire.messages, of which these are a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.wire.shards import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterStager:
    node: str
    host: str
    cache_dir: str
    budget_bytes: int
    metrics: str = ""
    """Of its /metrics, "host:port"; "" without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagerRegistered:
    lease: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardNeed:
    shard: Shard
    crc32: int
    """Of the whole file; -1 where the index does not know it."""
    next_use: int
    """Order of need: the stager copies small numbers first and evicts large ones first."""
    copy: bool = True
    """False: needed too late to be copied now; says what a copy that is there is worth."""
    share: float = 1.0
    """What part of the shard is read soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PullStaging:
    """Also the heartbeat."""

    node: str
    lease: int
    version: int
    """Of the last need list the stager has."""
    wait_s: float
    cached_bytes: int
    cached_shards: int
    copied_bytes: int
    evictions: int
    errors: int
    copied_shards: int = 0
    bytes_per_s: float = 0.0
    missing_bytes: int = 0
    missing_shards: int = 0
    """Still to be copied."""
    read_through_bytes: int = 0
    read_through_shards: int = 0
    """Needed soon, but without room: read from their origins."""
    stalls: int = 0
    """Reads given up at their deadline."""
    disk_full: int = 0
    last_error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    version: int
    needs: tuple[ShardNeed, ...] | None
    """None: unchanged."""
