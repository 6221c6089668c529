"""Staging at the coordinator: which data node holds which lane, and what its stager needs when.

Invariants: lanes move only when the set of stagers changes, and then no more of them than must;
a set that has been the same for a stager's lease is what later changes start from, also after a
coordinator restart; the lists follow the slowest rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Collection

from dataservice.actors.plan_messages import NeedsRequest
from dataservice.actors.shared import MAX_WAIT_S, Shared
from dataservice.core.lanes import lane_nodes
from dataservice.core.spreading import poll_s
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
        self._holders: tuple[str, ...] = ()
        """By lane, the name of the node that has it now."""
        self._changed = 0.0
        """When the set of stagers did."""
        self._came = False
        """Whether any stager has."""
        self._expected_until = math.inf
        """Then those of `log.lane_holders` that have not come are given up."""

    def expire(self) -> None:
        registry, now = self._shared.registry, time.monotonic()
        for node in registry.expired_stagers():
            del registry.stagers[node]
            if node in self._shared.drained_nodes:
                _LOG.info("stager of %s has left", node)
                continue
            self._shared.counters["stagers_lost"] += 1
            _LOG.warning("stager of %s is gone; its lanes move", node)
            self.map_lanes()
            self._shared.on_scale()
        if self._expected_until <= now:
            self._expected_until = math.inf
            self.map_lanes()
        elif self._holders and now - self._changed > registry.stager_lease_s:
            self._settle()

    def _settle(self) -> None:
        log = self._shared.log
        if self._holders != log.lane_holders:
            log.lanes(self._holders)

    async def register_stager(self, request: RegisterStager) -> StagerRegistered:
        _ = self._shared.plan
        if not self._came and self._shared.log.lane_holders:
            self._expected_until = time.monotonic() + self._shared.registry.stager_lease_s
        self._came = True
        seat = self._shared.registry.seat_stager(request)
        _LOG.info("stager joined on %s, cache %s", request.node, request.cache_dir)
        self.map_lanes()
        return StagerRegistered(lease=seat.lease)

    def map_lanes(self) -> None:
        """By the names of hosts where these differ, which a cluster that is started anew has again:
        its caches hold the lanes that they held before."""
        stagers, drained = self._shared.registry.stagers, self._shared.drained_nodes
        hosts = [seat.hello.host for seat in stagers.values()]
        by_host = len(set(hosts)) == len(hosts)
        nodes = {
            seat.hello.host if by_host else node: node
            for node, seat in stagers.items()
            if node not in drained
        }
        before = self._shared.lane_nodes
        self._holders = self._placed(nodes)
        self._shared.lane_nodes = tuple(nodes.get(name, "") for name in self._holders)
        self._shared.counters["lanes_moved"] += sum(
            old not in ("", new) for old, new in zip(before, self._shared.lane_nodes, strict=False)
        )
        self._changed = time.monotonic()
        self._needs_version += 1
        self._shared.changes.notify()

    def _placed(self, nodes: Collection[str]) -> tuple[str, ...]:
        """Name of the node that has each lane. After a restart of the coordinator the nodes that
        held lanes keep them until their stagers had time to come."""
        if not nodes:
            return ()
        registry = self._shared.registry
        held = self._shared.log.lane_holders
        waited_for = {*held} if self._expected_until < math.inf else set()
        for node in self._shared.drained_nodes & registry.stagers.keys():
            waited_for -= {node, registry.stagers[node].hello.host}
        names = sorted({*nodes} | waited_for)
        return tuple(names[i] for i in lane_nodes(self._shared.plan.num_lanes, names, held))

    async def pull_staging(self, request: PullStaging) -> Staging:
        seat = self._shared.registry.stager(request.node, request.lease)
        seat.stats = request
        longest = min(request.wait_s, self._shared.registry.lease_s)
        until = time.monotonic() + poll_s(longest, random.random())
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
