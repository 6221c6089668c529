"""Which shards the windows of a lane read, how soon and how much of them: what stagers go by.

Invariants: of the next windows every shard is named that their packs read; of later ones, found
from the order of samples alone, the record files and the archives that belong to them. A window's
samples are looked up once, however often the list is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.actors.shard_messages import shard_of
from dataservice.core.packspec import ShardRef
from dataservice.core.plan import Plan
from dataservice.core.tables import IndexView, WindowPlan
from dataservice.wire.staging import ShardNeed

WINDOWS_KNOWN = 64
"""How far the order of samples is looked at, in windows a lane."""
MAX_NEEDS = 100_000
"""Shards in a staging list, where each file of an image folder is one; the later ones are cut."""
_NEW_WINDOWS = 4096
"""Later windows that are looked up in one call, some 50 microseconds each."""

RecordFile = tuple[int, int]
"""(source number, number of the record file in it)"""


class ShardIndex(IndexView, Protocol):
    """What is needed of storage.index."""

    def shards_of(self, window: WindowPlan) -> tuple[ShardRef, ...]: ...

    def shards_beside(self, source: int, number: int) -> tuple[ShardRef, ...]: ...

    def shard_crc(self, shard: ShardRef) -> int: ...


class ShardNeeds:
    """For one planning process."""

    def __init__(self, plan: Plan, index: ShardIndex) -> None:
        self._plan = plan
        self._index = index
        self._samples = [source.shard_samples for source in index.sources]
        self._first_rows = [np.cumsum([0, *sizes], dtype=np.int64) for sizes in self._samples]
        self._files: dict[tuple[int, int], Counter[RecordFile]] = {}
        """By (lane, window): samples of each record file."""
        self._beside: dict[RecordFile, tuple[ShardRef, ...]] = {}
        """Within one call: a lazy index learns of archives as it counts."""

    def of_lanes(
        self, windows: Sequence[int], windows_ahead: int, *, counted_only: bool = False
    ) -> tuple[tuple[ShardNeed, ...], ...]:
        """By lane, for lanes that are at the given windows; next_use counts windows from there.

        With `counted_only` also the next windows are named from the order of samples, which a lazy
        index can do at any time.
        """
        self._forget(windows)
        most = MAX_NEEDS // max(1, len(windows))
        nearest = [
            self._near(lane, window, windows_ahead, counted_only)
            for lane, window in enumerate(windows)
        ]
        self._look_further(windows, windows_ahead)
        lanes = []
        for lane, (window, near) in enumerate(zip(windows, nearest, strict=True)):
            shares = self._shares(lane, range(window, window + windows_ahead))
            later = self._later(lane, window, windows_ahead)
            needs = (
                *(self._need(s, ahead, True, shares.get(s, 1.0)) for s, ahead in near.items()),
                *(self._need(s, ahead, False, 0.0) for s, ahead in later.items() if s not in near),
            )
            lanes.append(needs[:most])
        return tuple(lanes)

    def _near(
        self, lane: int, window: int, windows_ahead: int, counted_only: bool
    ) -> dict[ShardRef, int]:
        """Shards that the next windows read, and in which of them first."""
        first: dict[ShardRef, int] = {}
        for ahead in range(windows_ahead):
            place = (lane, window + ahead)
            if not self._exists(*place):
                break
            self._look_up(*place)
            if counted_only:
                shards = [s for file in self._files[place] for s in self._of_file(file)]
            else:
                shards = list(self._index.shards_of(self._plan.window(*place)))
            for shard in shards:
                first.setdefault(shard, ahead)
        return first

    def _later(self, lane: int, window: int, windows_ahead: int) -> dict[ShardRef, int]:
        first: dict[ShardRef, int] = {}
        for ahead in range(windows_ahead, WINDOWS_KNOWN):
            for file in self._files.get((lane, window + ahead), ()):
                for shard in self._of_file(file):
                    first.setdefault(shard, ahead)
        return first

    def _shares(self, lane: int, windows: range) -> dict[ShardRef, float]:
        """What part of a shard's samples the windows read; an archive has the samples of the record
        files that it belongs to. Files of image folders are not among them."""
        read: Counter[RecordFile] = Counter()
        for window in windows:
            read.update(self._files.get((lane, window), {}))
        samples: Counter[ShardRef] = Counter()
        total: Counter[ShardRef] = Counter()
        for (source, number), count in read.items():
            for shard in self._of_file((source, number)):
                samples[shard] += count
                total[shard] += self._samples[source][number]
        return {shard: min(1.0, count / total[shard]) for shard, count in samples.items()}

    def _need(self, shard: ShardRef, ahead: int, copy: bool, share: float) -> ShardNeed:
        return ShardNeed(
            shard=shard_of(shard),
            crc32=self._index.shard_crc(shard),
            next_use=ahead,
            copy=copy,
            share=round(share, 4),
        )

    # ---- windows ---------------------------------------------------------------------------------

    def _exists(self, lane: int, window: int) -> bool:
        last = self._plan.windows_in(lane)
        return last is None or window < last

    def _look_further(self, windows: Sequence[int], windows_ahead: int) -> None:
        """Later windows that are not known yet, the nearest first."""
        left = _NEW_WINDOWS
        for ahead in range(windows_ahead, WINDOWS_KNOWN):
            for lane, window in enumerate(windows):
                place = (lane, window + ahead)
                if left and place not in self._files and self._exists(*place):
                    self._look_up(*place)
                    left -= 1

    def _look_up(self, lane: int, window: int) -> None:
        if (lane, window) in self._files:
            return
        source, row = self._plan.samples(lane, window)
        files: Counter[RecordFile] = Counter()
        for number in np.unique(source).tolist():
            files.update(self._count(number, row[source == number]))
        self._files[lane, window] = files

    def _count(self, source: int, rows: NDArray[np.int64]) -> dict[RecordFile, int]:
        places = np.searchsorted(self._first_rows[source], rows, side="right") - 1
        found, counts = np.unique(places, return_counts=True)
        pairs = zip(found.tolist(), counts.tolist(), strict=True)
        return {(source, file): count for file, count in pairs}

    def _of_file(self, file: RecordFile) -> tuple[ShardRef, ...]:
        if file not in self._beside:
            self._beside[file] = self._index.shards_beside(*file)
        return self._beside[file]

    def _forget(self, windows: Sequence[int]) -> None:
        """What lies behind the lanes, or so far ahead that it was another session's."""
        self._beside.clear()
        for lane, window in list(self._files):
            if not windows[lane] <= window < windows[lane] + WINDOWS_KNOWN:
                del self._files[lane, window]
