"""Deals the packs of steps to workers, and those of workers that are gone to others.

Invariants: packs are dealt in the order of need; a step is dealt a little at a time, so that other
calls are answered meanwhile; a pack that nobody takes waits for the next worker that joins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from dataservice.actors.session import Session
from dataservice.actors.shared import Shared
from dataservice.actors.steps import ActiveStep
from dataservice.core.dispatch import choose_worker

PACKS_AT_ONCE = 512
"""Dealt in one turn of the event loop, two milliseconds."""


class Dealer:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._avoid: dict[tuple[int, str], frozenset[str]] = {}
        """Workers on which a pack failed, by (session, pack)."""

    def avoid(self, session: Session, pack_id: str, worker_id: str) -> None:
        """Where the pack failed, while there are others."""
        key = (session.generation, pack_id)
        self._avoid[key] = self._avoid.get(key, frozenset()) | {worker_id}

    def forget_failures(self) -> None:
        self._avoid.clear()

    def deal(self, session: Session, active: ActiveStep, packs: Sequence[int]) -> None:
        """Gives packs to workers, or to nobody while there is none."""
        usable = self._shared.registry.usable_workers()
        on_node: dict[str, list[str]] = {}
        for worker_id in usable:
            node = self._shared.registry.workers[worker_id].hello.node
            on_node.setdefault(node, []).append(worker_id)
        first_round = active.step * session.grid.micro_steps
        nodes, give = self._shared.lane_nodes, self._shared.registry.give
        columns = (active.micro_step, active.dp_rank, active.lane)
        places = zip(packs, *(column[packs].tolist() for column in columns), strict=True)
        for i, micro_step, dp_rank, lane in places if packs else ():
            avoid: frozenset[str] = frozenset()
            if self._avoid:
                key = (session.generation, active.planned.pack_ids[i])
                avoid = self._avoid.get(key, avoid)
            worker = choose_worker(
                dp_rank,
                first_round + micro_step,
                dp_size=session.grid.dp_size,
                home_workers=on_node.get(nodes[lane], ()) if lane >= 0 and nodes else (),
                all_workers=usable,
                avoid=avoid,
            )
            active.worker[i] = worker
            if worker is None:
                active.orphaned = True
            elif lane >= 0 and not session.is_done(active.step, micro_step, dp_rank):
                give(worker, session.generation, active.step, i)

    async def deal_step(self, session: Session, active: ActiveStep) -> None:
        """All of it that nobody has yet."""
        for first in range(0, len(active.order), PACKS_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            if session is not self._shared.session:
                return
            packs = active.order[first : first + PACKS_AT_ONCE]
            self.deal(session, active, [i for i in packs if active.worker[i] is None])

    def deal_orphans(self, session: Session) -> None:
        for step in sorted(session.steps):
            active = session.steps[step]
            if active.orphaned:
                active.orphaned = False
                self.deal(session, active, [i for i in active.order if active.worker[i] is None])

    def deal_anew(self, session: Session, workers: Collection[str]) -> None:
        """What some workers had. A look at all packs, which takes milliseconds."""
        for step in sorted(session.steps):
            active = session.steps[step]
            theirs = [i for i in active.order if active.worker[i] in workers]
            for i in theirs:
                active.worker[i] = None
            self.deal(session, active, theirs)
