"""Counts blocks of a lazy index in the process that holds it.

Invariants: what is counted is kept before it is told; a block that cannot be counted costs no
other; its threads end with `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dataservice.errors import DataServiceError
from dataservice.storage.archives import Archives
from dataservice.storage.counting import RecordCounter
from dataservice.storage.lazy.blocks import Kept, Key
from dataservice.storage.lazy.counting import BlockCounter
from dataservice.storage.lazy.index import LazyIndex
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.sources import SourceFiles

_THREADS = 4
"""Most of the work waits for storage or for the interpreter's lock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    key: Key
    kept: Kept | None
    """None where it failed, or was kept before."""
    error: DataServiceError | None


class CountingHere:
    """Close it before the index."""

    def __init__(
        self,
        index: LazyIndex,
        sources: Sequence[SourceFiles],
        counter: RecordCounter,
        *,
        deadline_s: float = 60.0,
        retries: int = 3,
        store: Store | None = None,
    ) -> None:
        self._index = index
        self._sources = sources
        self._counter = counter
        self._deadline_s = deadline_s
        self._store = store or Store(attempts=retries + 1)
        self._own_store = None if store else self._store
        self._reader = ShardReader(None, deadline_s=deadline_s, store=self._store)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="counting")
        self._of_thread = threading.local()
        self._archives: list[Archives] = []

    def count(self, keys: Sequence[Key]) -> list[Outcome]:
        """In the order of the keys."""
        return list(self._pool.map(self._one, keys))

    def count_all(self, keys: Sequence[Key]) -> None:
        """For `Blocks.on_missing`. Raises what one of them failed with."""
        for outcome in self.count(keys):
            if outcome.error is not None:
                raise outcome.error

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for archives in self._archives:
            archives.close()
        if self._own_store is not None:
            self._reader.close()
            self._own_store.close()

    def _one(self, key: Key) -> Outcome:
        try:
            payload = self._counter_of_thread().count(self._index.blocks.place(key))
            kept = self._index.blocks.keep(key, payload)
        except DataServiceError as error:
            return Outcome(key=key, kept=None, error=error)
        return Outcome(key=key, kept=kept, error=None)

    def _counter_of_thread(self) -> BlockCounter:
        if not hasattr(self._of_thread, "counter"):
            archives = Archives(self._store, self._index.index_dir, deadline_s=self._deadline_s)
            self._archives.append(archives)
            self._of_thread.counter = BlockCounter(
                self._sources,
                self._counter,
                reader=self._reader,
                archives=archives,
                store=self._store,
                deadline_s=self._deadline_s,
                roots=self._index.roots,
                folder=self._index.index_dir,
            )
        found: BlockCounter = self._of_thread.counter
        return found
