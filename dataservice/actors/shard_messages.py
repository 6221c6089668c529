"""Shards as they travel, and as the plan and storage know them."""

from __future__ import annotations

from dataclasses import asdict

from dataservice.core.packspec import ShardRef
from dataservice.wire.shards import Shard


def shard_of(ref: ShardRef) -> Shard:
    return Shard(**asdict(ref))


def ref_of(shard: Shard) -> ShardRef:
    return ShardRef(**asdict(shard))
