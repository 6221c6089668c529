"""Which blocks are to be counted, who counts them, and in which order.

Invariants: plain state without clock or I/O: the time is passed in; a block is held once, whoever
asked for it; a block whose worker is gone or has lost it is given to another; a block that failed
waits before it is tried again, on another worker where there is one.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dataservice.wire.counting import CountBlock

Key = tuple[int, int]
"""(file, block)."""
Seat = tuple[str, int]
"""(worker, lease)."""

COUNTED: Seat = ("", 0)
"""Of blocks that are counted and on their way to be kept."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
"""Before a failed block is tried again; doubled each time."""


@dataclass(slots=True)
class _Wanted:
    job: CountBlock
    order: int
    urgent_since: float | None = None
    """A step waits for it since then."""
    seat: Seat | None = None
    """Who counts it now."""
    since: float = 0.0
    """When it was given to it."""
    failures: int = 0
    not_before: float = 0.0
    failed_on: set[str] = field(default_factory=set)
    reason: str = ""
    """Of its last failure."""

    @property
    def rank(self) -> tuple[bool, int]:
        return self.urgent_since is None, self.order


def key_of(job: CountBlock) -> Key:
    return job.file, job.block


class CountQueue:
    def __init__(self) -> None:
        self._wanted: dict[Key, _Wanted] = {}
        self._free: list[tuple[bool, int, Key]] = []
        """A heap by rank; an entry counts while its block is free and has that rank."""
        self._resting: list[Key] = []
        """Blocks that failed and are not tried again yet."""
        self._held: dict[Seat, set[Key]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, key: Key) -> bool:
        return key in self._wanted

    def want(self, jobs: Iterable[CountBlock], *, urgent_since: float | None = None) -> None:
        """Adds what is not held yet; makes urgent what is."""
        for job in jobs:
            key = key_of(job)
            wanted = self._wanted.get(key)
            if wanted is None:
                wanted = self._wanted[key] = _Wanted(job, self._next, urgent_since)
                self._next += 1
                self._offer(key, wanted)
            elif wanted.urgent_since is None and urgent_since is not None:
                wanted.urgent_since = urgent_since
                if wanted.seat is None and key not in self._resting:
                    self._offer(key, wanted)

    def give(self, seat: Seat, most: int, now: float, workers: int) -> list[CountBlock]:
        """Blocks for a worker, until it has `most` to count, the most urgent first; `workers` is
        how many there are. What it failed at goes to it again only where there is no other."""
        held = self._held.setdefault(seat, set())
        self._wake(now)
        chosen: list[CountBlock] = []
        others: list[tuple[bool, int, Key]] = []
        while self._free and len(held) < most:
            entry = heapq.heappop(self._free)
            key = entry[2]
            wanted = self._wanted.get(key)
            if wanted is None or wanted.seat is not None or wanted.rank != entry[:2]:
                continue
            if seat[0] in wanted.failed_on and len(wanted.failed_on) < workers:
                others.append(entry)
                continue
            wanted.seat, wanted.since = seat, now
            held.add(key)
            chosen.append(wanted.job)
        for entry in others:
            heapq.heappush(self._free, entry)
        return chosen

    def held(self, seat: Seat, keys: Collection[Key]) -> None:
        """What a worker says it has; anything else that it was given did not reach it."""
        for key in self._held.get(seat, set()) - set(keys):
            self._take_back(key)

    def arrived(self, key: Key) -> bool:
        """A worker has counted the block; False where nobody wants it, or somebody was sooner."""
        wanted = self._wanted.get(key)
        if wanted is None or wanted.seat == COUNTED:
            return False
        if wanted.seat is not None:
            self._held[wanted.seat].discard(key)
        wanted.seat = COUNTED
        return True

    def release(self, alive: Collection[Seat]) -> int:
        """Takes the blocks of workers that are gone back; returns how many."""
        gone = [seat for seat in self._held if seat not in alive]
        keys = [key for seat in gone for key in self._held[seat]]
        for key in keys:
            self._take_back(key)
        for seat in gone:
            del self._held[seat]
        return len(keys)

    def overdue(self, before: float, most: int, now: float) -> list[Key]:
        """Blocks that steps wait for since `before`, and that nobody counts or somebody has been
        counting since then; those first that come last, which others get to last."""
        found = [
            (wanted.rank, key)
            for key, wanted in self._wanted.items()
            if wanted.urgent_since is not None
            and wanted.urgent_since <= before
            and wanted.not_before <= now
            and (wanted.seat is None or (wanted.seat != COUNTED and wanted.since <= before))
        ]
        return [key for _, key in heapq.nlargest(most, found)]

    def done(self, keys: Iterable[Key]) -> None:
        for key in keys:
            wanted = self._wanted.pop(key, None)
            if wanted is not None and wanted.seat is not None:
                self._held.get(wanted.seat, set()).discard(key)

    def failed(self, key: Key, worker: str, reason: str, now: float) -> None:
        wanted = self._wanted.get(key)
        if wanted is None:
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(wanted.failures, 16))
        wanted.failures += 1
        wanted.not_before = now + pause_s
        wanted.failed_on.add(worker)
        wanted.reason = reason
        if wanted.seat is not None:
            self._held.get(wanted.seat, set()).discard(key)
            wanted.seat = None
        if key not in self._resting:
            self._resting.append(key)

    def reason_of(self, keys: Iterable[Key]) -> tuple[Key, str] | None:
        """The first of them that failed, and why; None where none did."""
        for key in keys:
            if key in self._wanted and self._wanted[key].reason:
                return key, self._wanted[key].reason
        return None

    def _offer(self, key: Key, wanted: _Wanted) -> None:
        heapq.heappush(self._free, (*wanted.rank, key))

    def _take_back(self, key: Key) -> None:
        wanted = self._wanted[key]
        assert wanted.seat is not None
        self._held[wanted.seat].discard(key)
        wanted.seat = None
        self._offer(key, wanted)

    def _wake(self, now: float) -> None:
        resting, self._resting = self._resting, []
        for key in resting:
            wanted = self._wanted.get(key)
            if wanted is None:
                continue
            if wanted.not_before > now:
                self._resting.append(key)
            elif wanted.seat is None:
                self._offer(key, wanted)
