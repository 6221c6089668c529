"""The coordinator: owns plan, session, leases and journal, and answers every control call.

Invariants: all state lives in one event loop and changes only there; planning runs in a process of
its own, so that calls stay quick meanwhile; a restarted coordinator goes on from its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from functools import partial
from typing import cast

from dataservice.actors.counting_desk import CountingDesk
from dataservice.actors.draining_desk import DrainingDesk
from dataservice.actors.fleet_view import KEEP_S, FleetNews, FleetView
from dataservice.actors.hole_desk import HoleDesk
from dataservice.actors.ownership import RENEWALS_A_LEASE, Ownership
from dataservice.actors.plan_messages import PlanInfo
from dataservice.actors.planner_link import LazyPlannerLink, PlannerLink
from dataservice.actors.planning_ahead import PLANNER_RESTARTS
from dataservice.actors.scaling_desk import ScalingDesk
from dataservice.actors.session_desk import SessionDesk
from dataservice.actors.shared import Shared
from dataservice.actors.staging_desk import StagingDesk
from dataservice.actors.state_log import StateLog
from dataservice.actors.status import status_of
from dataservice.actors.waiting import kept_up
from dataservice.actors.work_desk import WorkDesk
from dataservice.config import Config
from dataservice.errors import DeadlineExceeded, JobHeld, ServiceUnavailable
from dataservice.wire.messages import GetStatus, StatusReport

_LOG = logging.getLogger(__name__)


class Coordinator:
    """Implements rpc.server.CoordinatorService; each desk answers its part of the calls."""

    def __init__(self, config: Config, planner: PlannerLink, log: StateLog) -> None:
        self.shared = Shared(config, planner, log)
        # with a full index it is never asked
        self.counting = CountingDesk(self.shared, cast(LazyPlannerLink, planner))
        self._lazy = config.index == "lazy"
        if self._lazy:
            self.shared.planner = self.counting.planner
        self.holes = HoleDesk(self.shared)
        self.work = WorkDesk(self.shared, self.counting, self.holes)
        self.staging = StagingDesk(self.shared)
        self.sessions = SessionDesk(self.shared, self.work)
        self._fleet_changed = asyncio.Event()
        self.shared.on_scale = self._fleet_changed.set
        self.scaling = ScalingDesk(self.shared, self._fleet_changed.set)
        self.draining = DrainingDesk(self.shared, self.work, self.staging, self.wind_down)
        self._tasks: list[asyncio.Future[None]] = []

        self.open_session = self.sessions.open_session
        self.get_steps = self.sessions.get_steps
        self.report_progress = self.sessions.report_progress
        self.register_worker = self.work.register_worker
        self.pull_work = self.work.pull_work
        self.get_assignment = self.work.get_assignment
        self.report_holes = self.holes.report_holes
        self.report_pack_failed = self.work.report_pack_failed
        self.report_counts = self.counting.report_counts
        self.get_roots = self.counting.get_roots
        self.register_stager = self.staging.register_stager
        self.pull_staging = self.staging.pull_staging
        self.scale = self.scaling.scale
        self.drain = self.draining.drain

    async def start(self) -> None:
        """Opens the plan, restores what the journal holds, and watches leases."""
        shared = self.shared
        if shared.log.ownership is not None:
            keep = partial(self._keep_ownership, shared.log.ownership)
            self._tasks.append(asyncio.ensure_future(kept_up("ownership", keep)))
        shared.info = await self._open_plan()
        for warning in shared.info.warnings:
            _LOG.warning("%s", warning)
        self.counting.opened(shared.info)
        shared.log.start_epoch(shared.info.digest, shared.config.job)
        for hole in shared.log.holes:
            shared.holes.restore(hole)
        shared.quarantine.start(shared.info.digest)
        self.sessions.restore()
        self._tasks += [
            asyncio.ensure_future(kept_up("lease watch", self._watch_leases)),
            asyncio.ensure_future(kept_up("staging list", self.staging.keep_needs)),
            asyncio.ensure_future(kept_up("autoscaler", self.scaling.keep)),
            *(self.counting.tasks() if self._lazy else ()),
        ]

    def wind_down(self) -> None:
        """No more steps from now on; what was handed out is still built and served."""
        self.shared.winding_down = True
        self.shared.changes.notify()

    async def _open_plan(self) -> PlanInfo:
        """Tried again where the planning process ends meanwhile."""
        lost = 0
        while True:
            try:
                return await self.shared.planner.open(self.shared.config_json)
            except (ServiceUnavailable, DeadlineExceeded) as error:
                lost += 1
                self.shared.counters["planners_lost"] += 1
                if lost > PLANNER_RESTARTS:
                    raise
                _LOG.warning("%s; a new one is started", error)

    async def stop(self) -> None:
        self.wind_down()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sessions.stop()
        await self.shared.planner.close()
        self.shared.log.close()

    async def _keep_ownership(self, ownership: Ownership) -> None:
        pause_s = ownership.owner.lease_s / RENEWALS_A_LEASE
        while True:
            try:
                await asyncio.to_thread(ownership.renew)
            except JobHeld as error:
                self.shared.supersede(error)
                return
            await asyncio.sleep(pause_s)

    async def _watch_leases(self) -> None:
        registry = self.shared.registry
        pause_s = registry.lease_s / 4
        while True:
            registry.expected_workers = self.scaling.target
            before = time.monotonic()
            await asyncio.sleep(pause_s)
            late_s = time.monotonic() - before - pause_s
            if late_s > pause_s:
                registry.forgive(late_s)  # heartbeats wait while this loop was held up
            self.work.expire()
            self.counting.expire()
            self.staging.expire()

    def fleet(self, news: FleetNews) -> FleetView:
        """Takes what the keeper of the fleet knows, and tells it what it needs to know; raises
        JobHeld once another coordinator owns the job."""
        if self.shared.superseded is not None:
            raise self.shared.superseded
        for worker_id, how in news.ended.items():
            self.work.ended(worker_id, how)
        self.work.drain(news.drain)
        self.scaling.keeper_says(news)
        self.draining.keeper_says(news)
        self.shared.workers_without_room = news.without_room
        registry = self.shared.registry
        return FleetView(
            target_workers=self.scaling.target,
            by_hand=self.scaling.by_hand,
            workers={w: seat.draining for w, seat in registry.workers.items()},
            stagers=tuple(registry.stagers),
            drained=tuple(sorted(self.shared.drained_nodes)),
            winding_down=self.shared.winding_down,
        )

    async def fleet_changed(self) -> None:
        """Returns once the fleet should be looked at, and after KEEP_S in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_S):
                await self._fleet_changed.wait()
        self._fleet_changed.clear()

    async def get_status(self, request: GetStatus) -> StatusReport:
        status = status_of(self.shared) | self.scaling.status() | self.draining.status()
        return StatusReport(status=json.dumps(status))
