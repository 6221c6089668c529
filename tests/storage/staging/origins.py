"""Shards to stage, and stores that count, wait and hang."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dataservice.core.packspec import ShardRef
from dataservice.errors import StorageTimeout
from dataservice.storage.backends import ObjectStat
from dataservice.storage.objects import Store
from dataservice.storage.staging import Need, StagingArea

CONTENT = bytes(range(251)) * 400


class Origin:
    """A folder of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def make(self, name: str, size: int = 100, next_use: int = 1) -> Need:
        return self.make_of(name, (CONTENT * (size // len(CONTENT) + 1))[:size], next_use)

    def make_of(
        self,
        name: str,
        content: bytes,
        next_use: int = 1,
        *,
        packing: str = "",
        unpacked_bytes: int = 0,
    ) -> Need:
        path = self.folder / name
        path.write_bytes(content)
        stat = path.stat()
        shard = ShardRef(
            source="s",
            name=name,
            url=str(path),
            size_bytes=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            packing=packing,
            unpacked_bytes=unpacked_bytes,
        )
        return Need(shard=shard, crc32=zlib.crc32(content), next_use=next_use)


class CountingStore:
    """Reads of each URL; `before` is called ahead of each of them."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self._store = Store(attempts=1)
        self._before = before
        self._lock = threading.Lock()
        self.reads: Counter[str] = Counter()

    def stat(self, url: str, *, deadline_s: float) -> ObjectStat:
        return self._store.stat(url, deadline_s=deadline_s)

    def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
        with self._lock:
            self.reads[Path(url).name] += 1
        self._before(url)
        return self._store.read(url, offset, size, deadline_s=deadline_s)

    def glob(self, pattern: str, *, deadline_s: float) -> dict[str, ObjectStat | None]:
        return self._store.glob(pattern, deadline_s=deadline_s)

    def list_folder(
        self, folder: str, prefix: str, *, deadline_s: float
    ) -> dict[str, ObjectStat | None] | None:
        return self._store.list_folder(folder, prefix, deadline_s=deadline_s)

    def close(self) -> None:
        self._store.close()


class HangingStore(CountingStore):
    """Reads of the named shards never come."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def read(self, url: str, offset: int, size: int, *, deadline_s: float) -> bytes:
        if Path(url).name in self._names:
            threading.Event().wait(deadline_s)
            raise StorageTimeout(f"read {url} at {offset}: no answer within {deadline_s:g} s")
        return super().read(url, offset, size, deadline_s=deadline_s)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(area: StagingArea, clock: Clock | None = None) -> int:
    """Steps until there is nothing to do."""
    steps = 0
    while area.step():
        steps += 1
        assert area.figures().cached_bytes <= area.budget_bytes
        assert steps < 100
        if clock is not None:
            clock.now += 0.01
    return steps
