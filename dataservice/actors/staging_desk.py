"""Staging at the coordinator: which data node holds which lane, and what its stager needs when.

Invariants: lanes move only when the set of stagers changes; the lists follow the slowest rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from dataservice.actors.plan_messages import NeedsRequest
from dataservice.actors.shared import MAX_WAIT_S, Shared
from dataservice.core.lanes import lane_nodes
from dataservice.wire.shards import Shard
from dataservice.wire.staging import (
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
        """By the names of hosts where these differ, which a cluster that is started anew has again:
        its caches hold the lanes that they held before."""
        stagers = self._shared.registry.stagers
        nodes = sorted(stagers)
        hosts = [stagers[node].hello.host for node in nodes]
        names = hosts if len(set(hosts)) == len(hosts) else nodes
        placed = lane_nodes(self._shared.plan.num_lanes, names) if nodes else ()
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
        found: dict[Shard, ShardNeed] = {}
        for lane, needs in enumerate(self._lane_needs):
            if self._shared.lane_nodes and self._shared.lane_nodes[lane] == request.node:
                for need in needs:
                    known = found.get(need.shard)
                    found[need.shard] = need if known is None else both(need, known)
        return Staging(version=self._needs_version, needs=tuple(found.values()))

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


def both(one: ShardNeed, other: ShardNeed) -> ShardNeed:
    """What two lanes need of the same shard."""
    return dataclasses.replace(
        one,
        next_use=min(one.next_use, other.next_use),
        copy=one.copy or other.copy,
        share=min(1.0, one.share + other.share),
    )
