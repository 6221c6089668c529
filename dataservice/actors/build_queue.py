"""What a worker has to build, is building and holds ready; shared by its builder threads.

Invariants: bytes that a peer has yet to fetch stay within the bound, shared equally among the ranks
served (each may always hold one pack); packs leave in the order of need, one that a client asks for
whatever the bound; a builder of text-only packs is never given another, so those wait for no
picture; packs are kept until all peers have fetched them, longer only while there is room, and
built anew where one peer has run too far ahead of another.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dataservice.core.dispatch import Candidate, next_to_build
from dataservice.core.packspec import PackSpec
from dataservice.errors import DataServiceError
from dataservice.wire.encoded import EncodedPack


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    session: int
    pack_id: str
    need: tuple[int, int, int]
    """(step, micro-step, rank)."""
    spec: PackSpec
    holes: dict[str, str]
    storage_holes: bool
    size_bytes: int
    """Estimate, for the bound."""
    takers: int = 1
    """Peers that will fetch it; kept until they have."""
    isolated: bool = False
    """Whether its pictures are suspect: decoded in a process of their own."""
    alone: bool = False
    """Whether it is suspect itself: built while no other such pack is."""

    @property
    def dp_rank(self) -> int:
        return self.need[2]

    @property
    def text_only(self) -> bool:
        return self.spec.num_patches == 0


@dataclass(slots=True)
class _Ready:
    job: Job
    pack: EncodedPack

    @property
    def size_bytes(self) -> int:
        return self.pack.size_bytes


class BuildQueue:
    """`on_change` is called, without the lock, whenever a pack that somebody waits for became ready
    or failed."""

    def __init__(self, *, ready_bytes_bound: int, on_change: Callable[[], None]) -> None:
        self._bound = ready_bytes_bound
        self._on_change = on_change
        self._state = threading.Condition()
        self._session = 0
        self._ranks: set[int] = set()
        """Those it has been given packs for since the session began."""
        self._waiting: dict[str, Job] = {}
        self._order: list[tuple[tuple[int, int, int], int, str]] = []
        """Of those that wait, in the order of need: need, number of arrival, pack id."""
        self._arrivals = itertools.count()
        self._wanted: dict[str, int] = {}
        self._building: dict[str, Job] = {}
        self._ready: dict[str, _Ready] = {}
        self._served: OrderedDict[str, _Ready] = OrderedDict()
        self._taken_by: dict[str, tuple[tuple[int, int, int], set[int]]] = {}
        """Need and peers of packs that some peers have and others do not."""
        self._failed: dict[str, DataServiceError] = {}
        self._held: dict[int, int] = {}
        """Bytes ready or being built, by rank, that nobody has fetched."""
        self._served_bytes = 0
        self._busy_s, self._busy_until = 0.0, time.monotonic()
        """Packs under build, integrated over time up to then."""
        self._closed = False

    # ---- from the coordinator ----------------------------------------------------------------

    def start_session(self, session: int) -> None:
        """Drops everything of the sessions before."""
        with self._state:
            self._session = session
            self._ranks.clear()
            self._waiting.clear()
            self._order.clear()
            self._wanted.clear()
            self._ready.clear()
            self._served.clear()
            self._taken_by.clear()
            self._failed.clear()
            self._served_bytes = 0
            self._recount()
            self._state.notify_all()

    def add(self, *jobs: Job) -> None:
        with self._state:
            for job in jobs:
                known = job.pack_id in self._building or job.pack_id in self._ready
                if job.session != self._session or known or job.pack_id in self._served:
                    continue
                self._failed.pop(job.pack_id, None)
                if job.pack_id in self._waiting:
                    self._leave(job.pack_id)
                self._waiting[job.pack_id] = job
                insort(self._order, (job.need, next(self._arrivals), job.pack_id))
                self._ranks.add(job.dp_rank)
            self._state.notify_all()

    def forget_before(self, step: int) -> None:
        """Packs of earlier steps are needed by nobody."""
        with self._state:
            while self._order and self._order[0][0][0] < step:
                self._leave(self._order[0][2])
            for pack_id in [p for p, r in self._ready.items() if r.job.need[0] < step]:
                del self._ready[pack_id]
            for pack_id in [p for p, (need, _) in self._taken_by.items() if need[0] < step]:
                del self._taken_by[pack_id]
            for pack_id in [p for p, r in self._served.items() if r.job.need[0] < step]:
                self._served_bytes -= self._served.pop(pack_id).size_bytes
            self._recount()
            self._state.notify_all()

    # ---- for builder threads -----------------------------------------------------------------

    def take(self, *, text_only: bool = False) -> Job | None:
        """Blocks until there is a pack (without pictures) to build; None when the queue closes."""
        with self._state:
            while not self._closed:
                job = self._choose(text_only)
                if job is not None:
                    self._count_busy()
                    self._leave(job.pack_id)
                    self._building[job.pack_id] = job
                    self._recount()
                    return job
                self._state.wait()
            return None

    def give_back(self, count: int) -> list[str]:
        """Ids of packs that are not built here any more: at most so many of those that nobody waits
        for, from all over the order of need, so that what is left is needed as late as they are."""
        with self._state:
            free = [pack_id for _, _, pack_id in self._order if pack_id not in self._wanted]
            count = min(count, len(free))
            given = [free[(2 * i + 1) * len(free) // (2 * count)] for i in range(count)]
            for pack_id in given:
                self._leave(pack_id)
            return given

    def _choose(self, text_only: bool) -> Job | None:
        jobs = (self._waiting[pack_id] for _, _, pack_id in self._order)
        one_alone = any(job.alone for job in self._building.values())
        i = next_to_build(
            (
                Candidate(
                    dp_rank=job.dp_rank,
                    size_bytes=job.size_bytes,
                    asked=job.pack_id in self._wanted,
                    usable=(job.text_only or not text_only) and not (job.alone and one_alone),
                )
                for job in jobs
            ),
            self._held,
            ready_bytes_bound=self._bound,
            num_ranks=len(self._ranks),
        )
        return None if i is None else self._waiting[self._order[i][2]]

    def _leave(self, pack_id: str) -> None:
        """It waits no longer."""
        need = self._waiting.pop(pack_id).need
        at = bisect_left(self._order, (need, -1, ""))
        while self._order[at][2] != pack_id:
            at += 1
        del self._order[at]

    def finish(self, job: Job, pack: EncodedPack) -> None:
        with self._state:
            self._count_busy()
            self._building.pop(job.pack_id, None)
            if job.session == self._session:
                self._ready[job.pack_id] = _Ready(job, pack)
            self._recount()
            self._make_room()
            self._state.notify_all()
            wanted = job.pack_id in self._wanted
        if wanted:
            self._on_change()

    def fail(self, job: Job, error: DataServiceError) -> None:
        with self._state:
            self._count_busy()
            self._building.pop(job.pack_id, None)
            if job.session == self._session:
                self._failed[job.pack_id] = error
            self._recount()
            self._state.notify_all()
            wanted = job.pack_id in self._wanted
        if wanted:
            self._on_change()

    # ---- for the data server -----------------------------------------------------------------

    def want(self, pack_id: str) -> None:
        """A client waits for this pack: it is built in its turn, whatever the bound."""
        with self._state:
            self._wanted[pack_id] = self._wanted.get(pack_id, 0) + 1
            if pack_id in self._waiting:
                self._state.notify_all()

    def unwant(self, pack_id: str) -> None:
        with self._state:
            left = self._wanted.get(pack_id, 0) - 1
            if left > 0:
                self._wanted[pack_id] = left
            else:
                self._wanted.pop(pack_id, None)

    def knows(self, pack_id: str) -> bool:
        with self._state:
            return any(
                pack_id in where
                for where in (self._waiting, self._building, self._ready, self._served)
            )

    def pack_of(self, pack_id: str) -> EncodedPack | None:
        """None while it is not ready; raises the error that its build ended with."""
        with self._state:
            error = self._failed.get(pack_id)
            if error is not None:
                raise error
            ready = self._ready.get(pack_id) or self._served.get(pack_id)
            return ready.pack if ready is not None else None

    def served(self, pack_id: str, peer: int = 0) -> None:
        """A peer has all of it. Once as many have as will fetch it, it is kept while there is
        room."""
        with self._state:
            ready = self._ready.get(pack_id)
            if ready is None:
                return
            _, peers = self._taken_by.setdefault(pack_id, (ready.job.need, set()))
            peers.add(peer)
            if len(peers) >= ready.job.takers:
                del self._ready[pack_id], self._taken_by[pack_id]
                self._served[pack_id] = ready
                self._served_bytes += ready.size_bytes
            self._recount()
            self._make_room()
            self._make_room_of_begun()
            self._state.notify_all()

    # ---- figures -----------------------------------------------------------------------------

    def figures(self) -> tuple[int, int, int]:
        """(bytes held ready, packs held ready, packs waiting or being built)."""
        with self._state:
            ready = sum(r.size_bytes for r in self._ready.values())
            return (
                ready + self._served_bytes,
                len(self._ready),
                len(self._waiting) + len(self._building),
            )

    def reach(self, count: int) -> tuple[str, ...]:
        """Ids of the packs being built, and of the next `count` in the order of need."""
        with self._state:
            return (*self._building, *(pack_id for _, _, pack_id in self._order[:count]))

    def busy_s(self) -> float:
        """Time that packs were under build, all of them together."""
        with self._state:
            self._count_busy()
            return self._busy_s

    def _count_busy(self) -> None:
        now = time.monotonic()
        self._busy_s += (now - self._busy_until) * len(self._building)
        self._busy_until = now

    @property
    def session(self) -> int:
        return self._session

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()

    def _recount(self) -> None:
        held: dict[int, int] = {}
        for ready in self._ready.values():
            held[ready.job.dp_rank] = held.get(ready.job.dp_rank, 0) + ready.size_bytes
        for job in self._building.values():
            held[job.dp_rank] = held.get(job.dp_rank, 0) + job.size_bytes
        self._held = held

    def _make_room(self) -> None:
        unfetched = sum(self._held.values())
        while self._served and unfetched + self._served_bytes > self._bound:
            _, oldest = self._served.popitem(last=False)
            self._served_bytes -= oldest.size_bytes

    def _make_room_of_begun(self) -> None:
        """Where one peer runs ahead, packs that only the slow ones need, the last needed first."""
        unfetched = sum(self._held.values())
        begun = [pack_id for pack_id in self._taken_by if pack_id in self._ready]
        begun.sort(key=lambda pack_id: self._taken_by[pack_id][0])
        while begun and unfetched > self._bound:
            unfetched -= self._ready.pop(begun.pop()).size_bytes
        self._recount()
