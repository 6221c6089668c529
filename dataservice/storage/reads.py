"""The shapes of a ranged read, as readers of containers ask for it."""

from __future__ import annotations

from collections.abc import Callable

from dataservice.core.packspec import ShardRef

ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> exactly those bytes."""
ReadShard = Callable[[ShardRef, int, int], bytes]
"""(shard, offset, size) -> exactly those bytes, such as `ShardReader.read`."""
