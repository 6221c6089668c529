"""Plans the steps of a session ahead of its slowest rank, and has their packs dealt.

Invariants: a placement is journalled before any cell of it is handed out; no step is planned that
leads the slowest rank by `serving.plan_ahead_steps` or more; a planning process that ends or stays
silent is replaced PLANNER_RESTARTS times a step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace

from dataservice.actors.dealing import Dealer
from dataservice.actors.plan_messages import StepRequest
from dataservice.actors.session import Session
from dataservice.actors.shared import MAX_WAIT_S, Shared
from dataservice.actors.steps import ActiveStep
from dataservice.core.plan.check import no_step
from dataservice.errors import DataServiceError, DeadlineExceeded, ServiceUnavailable, StorageError
from dataservice.obs.logs import bound
from dataservice.wire.messages import CursorState

_LOG = logging.getLogger(__name__)

STEPS = "a step is handed out"
"""Topic of changes; that of a worker's packs is its id."""
PLANNER_RESTARTS = 3
"""So often may the planning process end, or stay silent, over one step before the session fails."""


JOURNAL_AGAIN_S = 1.0
"""Between two tries to write to a journal that cannot be written."""


class PlanningAhead:
    """Of one session at a time."""

    def __init__(self, shared: Shared, dealer: Dealer) -> None:
        self._shared = shared
        self._dealer = dealer
        self._patch_bytes = shared.config.plan.vision.patch_bytes
        self._task: asyncio.Future[None] | None = None

    def start(self, session: Session) -> None:
        """In place of the session before."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.ensure_future(self._plan_ahead(session))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _plan_ahead(self, session: Session) -> None:
        lost = 0
        try:
            while session.end_step < 0 and not self._shared.winding_down:
                limit = session.done_step + self._shared.config.serving.plan_ahead_steps
                if session.next_step >= limit:
                    await self._shared.changes.wait(time.monotonic() + MAX_WAIT_S)
                    continue
                try:
                    with bound(step=session.next_step):
                        await self._plan_one(session)
                    lost = 0
                except (ServiceUnavailable, DeadlineExceeded) as error:
                    lost += 1
                    self._shared.counters["planners_lost"] += 1
                    _LOG.warning("%s; a new one is started", error)
                    self._shared.events.note(
                        "planner lost", f"{error}; a new one is started", level="warning"
                    )
                    if lost > PLANNER_RESTARTS:
                        raise
        except DataServiceError as error:
            self._shared.fail(session, error)
        except Exception as error:
            _LOG.exception("planning failed")
            text = f"planning failed with {type(error).__name__}: {error}; see the service's log"
            self._shared.fail(session, DataServiceError(text))

    async def _plan_one(self, session: Session) -> None:
        cursor = session.next_cursor
        inside = cursor.step == session.first_step and session.first_micro_step > 0
        if not inside:
            # inside a resumed step the placement must be the one that was handed out before
            saved = self._shared.log.homes_of(cursor.step)
            per_node = self._shared.config.ranks_per_node
            per_node, homes = saved or (per_node, self._lane_homes(session))
            cursor = replace(cursor, lane_homes=homes, ranks_per_node=per_node)
        planned = await self._shared.planner.step(
            StepRequest(
                cursor=cursor,
                dp_size=session.grid.dp_size,
                micro_steps=session.grid.micro_steps,
                packs_per_cell=session.grid.packs_per_cell,
            )
        )
        if planned.end and sum(cursor.next_pack) == 0:
            raise no_step(self._shared.config.plan, session.grid)
        if planned.end:
            session.end_step = cursor.step
            self._shared.changes.notify()
            return
        await self._write_down(cursor)
        cursor = replace(cursor, excluded=planned.next_cursor.excluded)
        active = ActiveStep(cursor, planned, session.grid, patch_bytes=self._patch_bytes)
        self._shared.holes.planned_samples += planned.num_samples
        for source, counts in planned.counts.items():
            self._shared.sample_counts.setdefault(source, Counter()).update(counts)
        self._shared.counters["steps_planned"] += 1
        self._shared.counters["plan_ms"] += round(planned.plan_s * 1000)
        self._shared.counters["packs_moved"] += planned.moved
        self._shared.counters["steps_skipped"] += planned.steps_skipped
        self._shared.counters["samples_excluded"] += planned.samples_excluded
        self._shared.counters["moved_bytes"] += planned.moved_bytes
        session.steps[cursor.step] = active
        session.next_cursor = planned.next_cursor
        await self._dealer.deal_step(session, active)
        self._shared.changes.notify(STEPS)
        self._shared.changes.notify_gently(*self._shared.registry.workers)

    async def _write_down(self, cursor: CursorState) -> None:
        """The placement; a disk that is full or read-only for a time costs no more than that."""
        shared = self._shared
        while True:
            try:
                shared.log.placement(cursor, shared.config.exclude)
                break
            except StorageError as error:
                if not shared.planning_waits:
                    _LOG.warning("%s; it is tried again until it can be", error)
                    shared.events.note("journal", f"planning waits: {error}", level="error")
                shared.planning_waits = f"{error}; make room there, or mend its disk"
                await asyncio.sleep(JOURNAL_AGAIN_S)
        shared.planning_waits = ""

    def _lane_homes(self, session: Session) -> tuple[int, ...]:
        """Node number (dp_rank // ranks_per_node) of each lane's data node, -1 = holds no ranks."""
        per_node = self._shared.config.ranks_per_node
        if per_node <= 0:
            return (-1,) * self._shared.plan.num_lanes
        trainer_node: dict[str, int] = {}
        for rank in sorted(session.hosts):
            trainer_node.setdefault(session.hosts[rank][0], rank // per_node)
        stagers = self._shared.registry.stagers
        homes: list[int] = []
        for node in self._shared.lane_nodes or ("",) * self._shared.plan.num_lanes:
            host = stagers[node].hello.host if node in stagers else ""
            homes.append(trainer_node.get(node, trainer_node.get(host, -1)))
        return tuple(homes)
