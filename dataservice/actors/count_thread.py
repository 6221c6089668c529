"""A worker's thread that counts blocks of a lazy index and reports them.

Invariants: what it was given and has not reported is bounded by the coordinator; a block that
cannot be counted is reported with the reason, never dropped; reports that did not arrive are made
again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dataservice.actors.count_messages import file_of, place_of
from dataservice.config import Config
from dataservice.errors import DataServiceError, StaleIndexError
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.archives import Archives
from dataservice.storage.lazy.counting import BlockCounter
from dataservice.storage.lazy.manifest import LAZY_NAME
from dataservice.storage.lazy.scratch import ScratchFolder
from dataservice.storage.listing import FoundFile
from dataservice.storage.objects import ShardReader, Store
from dataservice.wire.counting import CountBlock, CountedBlock, GetRoots, ReportCounts, Roots

_LOG = logging.getLogger(__name__)

REPORTED_BLOCKS = 16
REPORTED_BYTES = 8 << 20
"""In one report, at most."""
RETRY_S = 0.5


class CountThread:
    """`run` is the thread's; the rest is for any thread."""

    def __init__(
        self,
        config: Config,
        renderer: TextRenderer,
        reader: ShardReader,
        ask: Callable[[object], Any],
        seat: Callable[[], tuple[str, int]],
    ) -> None:
        """`ask` asks the coordinator, `seat` is (worker, lease)."""
        self._state = threading.Condition()
        self._waiting: dict[tuple[int, int], CountBlock] = {}
        self._held: set[tuple[int, int]] = set()
        """Given and not reported."""
        self._closed = False
        self._ask = ask
        self._seat = seat
        self._store = Store(attempts=config.staging.retries + 1)
        shared = os.path.exists(os.path.join(config.index_dir, LAZY_NAME))
        self._scratch = None if shared else ScratchFolder("members")
        folder = config.index_dir if self._scratch is None else self._scratch.path
        self._archives = Archives(self._store, folder, deadline_s=config.staging.deadline_s)
        self._counter = BlockCounter(
            config.sources,
            renderer,
            reader=reader,
            archives=self._archives,
            store=self._store,
            deadline_s=config.staging.deadline_s,
            roots=self._files_of,
            folder=folder,
        )

    def add(self, jobs: Sequence[CountBlock]) -> None:
        with self._state:
            for job in jobs:
                key = (job.file, job.block)
                if key not in self._held:
                    self._held.add(key)
                    self._waiting[key] = job
            self._state.notify()

    def held(self) -> tuple[tuple[int, ...], ...]:
        """(file, block) of what was given and is not reported."""
        with self._state:
            return tuple(self._held)

    def run(self) -> None:
        """Until `close`."""
        counted: list[CountedBlock] = []
        try:
            while (job := self._next(wait=not counted)) is not None or counted:
                if job is not None:
                    counted.append(self._counted(job))
                size = sum(len(block.rows) for block in counted)
                if job is None or len(counted) >= REPORTED_BLOCKS or size >= REPORTED_BYTES:
                    self._reported(tuple(counted))
                    counted = []
        finally:
            self._archives.close()
            self._store.close()
            if self._scratch is not None:
                self._scratch.close()

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._waiting.clear()
            self._state.notify_all()

    def _next(self, *, wait: bool) -> CountBlock | None:
        with self._state:
            while wait and not self._waiting and not self._closed:
                self._state.wait()
            if not self._waiting:
                return None
            key = next(iter(self._waiting))
            return self._waiting.pop(key)

    def _counted(self, job: CountBlock) -> CountedBlock:
        try:
            rows = self._counter.count(place_of(job))
        except Exception as error:
            if not isinstance(error, DataServiceError):
                _LOG.exception("block %d of %s/%s", job.block, job.shard.source, job.shard.name)
            return CountedBlock(
                file=job.file,
                block=job.block,
                reason=f"{type(error).__name__}: {error}",
                fatal=isinstance(error, StaleIndexError),
            )
        return CountedBlock(file=job.file, block=job.block, rows=rows)

    def _reported(self, blocks: tuple[CountedBlock, ...]) -> None:
        while not self._closed:
            try:
                worker_id, lease = self._seat()
                self._ask(ReportCounts(worker_id=worker_id, lease=lease, blocks=blocks))
                break
            except Exception as error:
                _LOG.warning("%d counted blocks were not heard of: %s", len(blocks), error)
                with self._state:
                    self._state.wait_for(lambda: self._closed, RETRY_S)
        with self._state:
            self._held -= {(block.file, block.block) for block in blocks}

    def _files_of(self, source: str) -> list[FoundFile]:
        worker_id, lease = self._seat()
        answer: Roots = self._ask(GetRoots(worker_id=worker_id, lease=lease, source=source))
        return [file_of(found) for found in answer.roots]
