"""Staging at the coordinator: which data node holds which lane, and what its stager needs when.

Invariants: lanes move only when the set of stagers changes; the lists follow the slowest rank.
"""

from __future__ import annotations

import asyncio
import logging
import time

from dataservice.actors.plan_messages import NeedsRequest
from dataservice.actors.shared import MAX_WAIT_S, Shared
from dataservice.core.lanes import lane_nodes
from dataservice.wire.messages import (
    PullStaging,
    RegisterStager,
    ShardNeed,
    StagerRegistered,
    Staging,
)

_LOG = logging.getLogger(__name__)

WINDOWS_AHEAD = 3
"""How far the staging list looks ahead, in windows a lane; the plan keeps four of each lane."""


class StagingDesk:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lane_needs: tuple[tuple[ShardNeed, ...], ...] = ()
        self._needs_version = 0

    def expire(self) -> None:
        registry = self._shared.registry
        for node in registry.expired_stagers():
            del registry.stagers[node]
            self._shared.counters["stagers_lost"] += 1
            _LOG.warning("stager of %s is gone; its lanes move", node)
            self.map_lanes()
            self._shared.on_scale()

    async def register_stager(self, request: RegisterStager) -> StagerRegistered:
        _ = self._shared.plan
        seat = self._shared.registry.seat_stager(request)
        _LOG.info("stager joined on %s, cache %s", request.node, request.cache_dir)
        self.map_lanes()
        return StagerRegistered(lease=seat.lease)

    def map_lanes(self) -> None:
        nodes = sorted(self._shared.registry.stagers)
        placed = lane_nodes(self._shared.plan.num_lanes, nodes) if nodes else ()
        self._shared.lane_nodes = tuple(nodes[i] for i in placed)
        self._needs_version += 1
        self._shared.changes.notify()

    async def pull_staging(self, request: PullStaging) -> Staging:
        seat = self._shared.registry.stager(request.node, request.lease)
        seat.stats = request
        until = time.monotonic() + min(request.wait_s, self._shared.registry.lease_s)
        while self._needs_version == request.version:
            if not await self._shared.changes.wait(until):
                return Staging(version=self._needs_version, needs=None)
            self._shared.registry.stager(request.node, request.lease)
        nearest: dict[tuple[str, str], ShardNeed] = {}
        for lane, needs in enumerate(self._lane_needs):
            if self._shared.lane_nodes and self._shared.lane_nodes[lane] == request.node:
                for need in needs:
                    known = nearest.get((need.source, need.name))
                    if known is None or need.next_use < known.next_use:
                        nearest[need.source, need.name] = need
        return Staging(version=self._needs_version, needs=tuple(nearest.values()))

    async def keep_needs(self) -> None:
        """Keeps the staging lists in step with the slowest rank."""
        seen: tuple[int, tuple[int, ...]] | None = None
        while True:
            session = self._shared.session
            cursor = self._shared.plan.start
            if session is not None:
                oldest = session.steps.get(session.done_step)
                cursor = oldest.cursor if oldest is not None else session.next_cursor
            generation = session.generation if session is not None else 0
            place = (generation, tuple(window for window, _ in cursor.lanes))
            if place != seen and self._shared.registry.stagers:
                needs = await self._shared.planner.needs(
                    NeedsRequest(cursor=cursor, windows_ahead=WINDOWS_AHEAD)
                )
                seen = place
                if needs.lanes != self._lane_needs:
                    self._lane_needs = needs.lanes
                    self._needs_version += 1
                    self._shared.changes.notify()
            await self._shared.changes.wait(time.monotonic() + MAX_WAIT_S)
            await asyncio.sleep(0.1)
