"""Moves packs that are not begun from workers that have many to one that has just come, and from
one that leaves to the others.

Invariants: a worker chooses what it gives back, so nothing is built twice; packs stay on the node
that stages their lane where a worker of that node can take them; clients learn the new place when
they ask for the pack at the old one.
"""

from __future__ import annotations

import asyncio
import heapq

from dataservice.actors.registry import WorkerSeat
from dataservice.actors.shared import Shared
from dataservice.wire.messages import PullWork

JOIN_S = 1.0
"""Workers that join within so long are given their share together."""
MOST_AT_ONCE = 1000
"""Packs that a worker is asked to give back in one answer."""


class Sharing:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._asked: dict[str, int] = {}
        """Worker -> packs that it has yet to be asked for."""
        self._joined: set[str] = set()
        """Nodes of workers that have just come."""

    def joined(self, node: str) -> None:
        if not self._joined:
            asyncio.get_running_loop().call_later(JOIN_S, self._share)
        self._joined.add(node)

    def leaves(self, worker_id: str) -> None:
        seat = self._shared.registry.workers.get(worker_id)
        if seat is not None and seat.stats is not None and self._shared.registry.usable_workers():
            self._asked[worker_id] = seat.stats.queued_packs

    def forget(self, worker_id: str) -> None:
        self._asked.pop(worker_id, None)

    def is_asked(self, worker_id: str) -> bool:
        return worker_id in self._asked

    def ask(self, worker_id: str) -> int:
        """Packs that it shall give back now."""
        left = self._asked.pop(worker_id, 0)
        if left > MOST_AT_ONCE:
            self._asked[worker_id] = left - MOST_AT_ONCE
        return min(left, MOST_AT_ONCE)

    def _share(self) -> None:
        nodes, self._joined = self._joined, set()
        for node in sorted(nodes):
            usable = self._shared.registry.usable_workers()
            there = [w for w in usable if self._seat(w).hello.node == node]
            alone = node not in self._shared.lane_nodes or len(there) < 2
            group = usable if alone else there
            queued = {w: _queued(self._seat(w)) for w in group}
            fair = -(-sum(queued.values()) // max(1, len(queued)))
            for worker_id, packs in queued.items():
                if packs - fair > 1:
                    self._asked[worker_id] = packs - fair
        self._shared.changes.notify()

    def returned(self, seat: WorkerSeat, request: PullWork) -> None:
        """Each goes to the worker that has the fewest."""
        session, worker_id = self._shared.session, request.worker_id
        if session is None or session.generation != request.session or not request.returned:
            return
        loads = {w: _queued(self._seat(w)) for w in self._shared.registry.usable_workers()}
        if len(loads) > 1:
            loads.pop(worker_id, None)
        heaps: dict[str, list[tuple[int, str]]] = {}
        for pack_id in request.returned:
            found = self._shared.find(session, pack_id)
            if found is None:
                continue
            active, i = found
            lane = int(active.lane[i])
            if active.worker[i] != worker_id or lane < 0:
                continue
            home = self._shared.lane_nodes[lane] if self._shared.lane_nodes else ""
            if home not in heaps:
                there = [w for w in loads if self._seat(w).hello.node == home] or list(loads)
                heaps[home] = [(loads[w], w) for w in there]
                heapq.heapify(heaps[home])
            active.worker[i] = None
            active.orphaned = True
            if heaps[home]:
                load, taker = heaps[home][0]
                heapq.heapreplace(heaps[home], (load + 1, taker))
                active.worker[i] = taker
                self._shared.registry.give(taker, session.generation, active.step, i)
            self._shared.counters["packs_shared"] += 1
        self._shared.changes.notify()

    def _seat(self, worker_id: str) -> WorkerSeat:
        return self._shared.registry.workers[worker_id]


def _queued(seat: WorkerSeat) -> int:
    return seat.stats.queued_packs if seat.stats is not None else 0
