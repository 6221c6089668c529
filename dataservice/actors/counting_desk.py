"""Counting at the coordinator: hands the blocks that the plan is about to need to workers, and what
they count to the planning process, which keeps it.

Invariants: blocks held and bytes on their way are bounded; a step whose blocks are not counted yet
waits, says for what, and fails with the reason after STEP_WAIT_S; a block that no worker counts in
time is counted by the planning process; what a worker reports that is gone by then is not lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dataservice.actors.count_queue import CountQueue, Key, key_of
from dataservice.actors.plan_messages import (
    AheadRequest,
    BlocksKept,
    LaneNeeds,
    NeedsRequest,
    PlanInfo,
    PlannedStep,
    StepRequest,
)
from dataservice.actors.planner_link import BlocksMissing, LazyPlannerLink
from dataservice.actors.registry import WorkerSeat
from dataservice.actors.shared import Shared
from dataservice.actors.waiting import kept_up
from dataservice.errors import DataServiceError, ServiceUnavailable, StaleIndexError
from dataservice.wire.counting import (
    CountBlock,
    CountedBlock,
    GetRoots,
    ReportCounts,
    Roots,
)
from dataservice.wire.messages import CursorState, Ok, PullWork

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

WINDOWS_AHEAD = 2
"""How far blocks are counted ahead of the next step, in windows a lane."""
HELD_AHEAD = 512
"""Blocks held that no step waits for, more where there are many workers; the next are asked for
when half of them are counted."""
HELD_BY_WORKER = 32
LEAST_HELD = 4
"""Blocks that one worker has to count: a fair share of all, between the two."""
ARRIVED_BYTES = 64 << 20
"""Counted blocks on their way to the planning process; past it, workers wait."""
KEPT_AT_ONCE = 8 << 20
"""Bytes of them in one request."""
STEP_WAIT_S = 600.0
"""After which a step whose blocks are still not counted fails the session."""
NEEDS_WAIT_S = 20.0
"""After which a staging list does without what is not counted yet."""
URGENT_S = 5.0
"""After which the planning process counts a block itself that a step waits for; at once where no
worker is there."""
COUNTED_HERE = 16
"""Blocks that the planning process counts before it answers others again."""
PAUSE_S = 0.25


class CountingDesk:
    def __init__(self, shared: Shared, link: LazyPlannerLink) -> None:
        self._shared = shared
        self._link = link
        self._queue = CountQueue()
        self._arrived: list[CountedBlock] = []
        self._arrived_bytes = 0
        self._stale = ""
        """Why no waiting can help: a record file is not what it was."""
        self._problem = ""
        """Why counted blocks cannot be kept for now."""
        self.planner = _CountingPlanner(link, self)
        """Of which steps wait for the blocks that they need."""

    def tasks(self) -> list[asyncio.Future[None]]:
        """Run while the service does."""
        return [
            asyncio.ensure_future(kept_up("counting ahead", self._look_ahead)),
            asyncio.ensure_future(kept_up("keeping counted blocks", self._keep_arrived)),
            asyncio.ensure_future(kept_up("counting of urgent blocks", self._count_here)),
        ]

    def opened(self, info: PlanInfo) -> None:
        """The index is open: what was counted for that."""
        if info.counted is not None:
            self._add(info.counted)

    # ---- workers -----------------------------------------------------------------------------

    def held(self, seat: WorkerSeat, request: PullWork) -> None:
        """Notes what a worker says that it has to count."""
        keys = {(file, block) for file, block in request.counting}
        self._queue.held((seat.hello.worker_id, seat.lease), keys)

    def give(self, seat: WorkerSeat) -> list[CountBlock]:
        """More for it to count."""
        if seat.draining or not len(self._queue):
            return []
        workers = len(self._shared.registry.usable_workers())
        key = (seat.hello.worker_id, seat.lease)
        share = max(LEAST_HELD, len(self._queue) // max(workers, 1))
        return self._queue.give(key, min(share, HELD_BY_WORKER), time.monotonic(), workers)

    def expire(self) -> None:
        seats = self._shared.registry.workers.values()
        if self._queue.release({(seat.hello.worker_id, seat.lease) for seat in seats}):
            self._shared.changes.notify()

    async def report_counts(self, request: ReportCounts) -> Ok:
        self._shared.registry.worker(request.worker_id, request.lease)
        until = time.monotonic() + self._shared.registry.lease_s
        while self._arrived_bytes > ARRIVED_BYTES:
            if not await self._shared.changes.wait(until):
                raise ServiceUnavailable("the planning process keeps no counted blocks for now")
            self._shared.registry.worker(request.worker_id, request.lease)
        for counted in request.blocks:
            if not counted.rows:
                self._failed(counted, request.worker_id)
            elif self._queue.arrived((counted.file, counted.block)):
                self._arrived.append(counted)
                self._arrived_bytes += len(counted.rows)
        self._shared.changes.notify()
        return Ok()

    async def get_roots(self, request: GetRoots) -> Roots:
        self._shared.registry.worker(request.worker_id, request.lease)
        return await self._link.roots(request.source)

    # ---- steps -------------------------------------------------------------------------------

    async def counted(
        self, jobs: tuple[CountBlock, ...], until: float, what: str, *, urgent: bool
    ) -> None:
        """Waits until blocks are counted and kept; DataServiceError with the reason at `until`."""
        self._queue.want(jobs, urgent_since=time.monotonic() if urgent else None)
        keys = [key_of(job) for job in jobs]
        self._shared.changes.notify()
        try:
            while left := [key for key in keys if key in self._queue]:
                if self._stale:
                    raise StaleIndexError(self._stale)
                waits_for = self._waits_for(jobs, left, what)
                if time.monotonic() >= until:
                    raise DataServiceError(f"{waits_for}; given up")
                if urgent:
                    self._shared.planning_waits = waits_for
                await self._shared.changes.wait(min(until, time.monotonic() + 1.0))
        finally:
            if urgent:
                self._shared.planning_waits = ""

    def _waits_for(self, jobs: tuple[CountBlock, ...], left: list[Key], what: str) -> str:
        key, reason = self._queue.reason_of(left) or (left[0], "")
        job = next(job for job in jobs if key_of(job) == key)
        reason = self._problem or reason
        return (
            f"{what} waits for {len(left)} blocks of records to be counted, such as block "
            f"{job.block} of {job.shard.source}/{job.shard.name}"
            + (f" ({reason})" if reason else "")
        )

    def _failed(self, counted: CountedBlock, worker_id: str) -> None:
        if counted.fatal:
            self._stale = self._stale or counted.reason
        key = (counted.file, counted.block)
        self._queue.failed(key, worker_id, counted.reason, time.monotonic())
        self._shared.counters["blocks_failed"] += 1
        _LOG.warning("block %d of file %d on %s: %s", *key[::-1], worker_id, counted.reason)

    def _note(self, jobs: list[Key], kept: BlocksKept, worker_id: str) -> None:
        failed = {(counted.file, counted.block) for counted in kept.failed}
        self._queue.done(key for key in jobs if key not in failed)
        for counted in kept.failed:
            self._failed(counted, worker_id)
        self._add(kept)
        self._shared.changes.notify()

    def _add(self, kept: BlocksKept) -> None:
        counters = self._shared.counters
        counters["blocks_counted"] += kept.blocks
        counters["records_counted"] += kept.rows
        counters["records_rejected"] += kept.rejected

    # ---- tasks -------------------------------------------------------------------------------

    async def _look_ahead(self) -> None:
        """Asks the plan which blocks it needs next, and holds some of them."""
        asked: tuple[CursorState, int] | None = None
        while True:
            place = self._next_cursor(), self._shared.counters["blocks_counted"]
            workers = len(self._shared.registry.usable_workers())
            most = max(HELD_AHEAD, 2 * HELD_BY_WORKER * workers)
            if workers and len(self._queue) <= most // 2 and place != asked:
                found = await self._link.ahead(
                    AheadRequest(cursor=place[0], windows_ahead=WINDOWS_AHEAD, most=most)
                )
                asked = place
                self._queue.want(found.blocks)
                if found.blocks:
                    self._shared.changes.notify()
            await self._shared.changes.wait(time.monotonic() + 1.0)
            await asyncio.sleep(0.05)

    def _next_cursor(self) -> CursorState:
        session = self._shared.session
        return self._shared.plan.start if session is None else session.next_cursor

    async def _keep_arrived(self) -> None:
        """Hands what workers counted to the planning process; what it cannot keep stays."""
        while True:
            if not self._arrived:
                await self._shared.changes.wait(time.monotonic() + 1.0)
                continue
            batch, size = [], 0
            for counted in self._arrived:
                batch.append(counted)
                size += len(counted.rows)
                if size >= KEPT_AT_ONCE:
                    break
            try:
                kept = await self._link.keep(tuple(batch))
            except DataServiceError as error:
                self._problem = f"they cannot be kept: {error}"
                _LOG.warning("%d counted blocks cannot be kept: %s", len(batch), error)
                await asyncio.sleep(1.0)
                continue
            self._problem = ""
            del self._arrived[: len(batch)]
            self._arrived_bytes -= size
            self._note([(c.file, c.block) for c in batch], kept, "the planning process")

    async def _count_here(self) -> None:
        """Has the planning process count what steps wait for and no worker counts in time."""
        while True:
            now = time.monotonic()
            alone = not self._shared.registry.usable_workers()
            keys = self._queue.overdue(now - (0 if alone else URGENT_S), COUNTED_HERE, now)
            if keys:
                kept = await self._link.count(tuple(keys))
                self._shared.counters["blocks_counted_by_planner"] += kept.blocks
                self._note(keys, kept, "the planning process")
            else:
                await asyncio.sleep(PAUSE_S)


class _CountingPlanner:
    """A planner whose answers may take as long as their blocks take to be counted."""

    def __init__(self, link: LazyPlannerLink, desk: CountingDesk) -> None:
        self._link = link
        self._desk = desk

    async def open(self, config: str) -> PlanInfo:
        return await self._link.open(config)

    async def close(self) -> None:
        await self._link.close()

    async def step(self, request: StepRequest) -> PlannedStep:
        return await self._patiently(
            lambda: self._link.step(request),
            STEP_WAIT_S,
            f"step {request.cursor.step}",
            urgent=True,
        )

    async def needs(self, request: NeedsRequest) -> LaneNeeds:
        """Without what is not counted in time."""
        try:
            return await self._patiently(
                lambda: self._link.needs(request), NEEDS_WAIT_S, "the staging list", urgent=False
            )
        except DataServiceError as error:
            _LOG.info("%s", error)
            return await self._link.needs(
                NeedsRequest(
                    cursor=request.cursor, windows_ahead=request.windows_ahead, counted_only=True
                )
            )

    async def _patiently(
        self, ask: Callable[[], Awaitable[T]], wait_s: float, what: str, *, urgent: bool
    ) -> T:
        until = time.monotonic() + wait_s
        while True:
            try:
                return await ask()
            except BlocksMissing as missing:
                await self._desk.counted(missing.blocks, until, what, urgent=urgent)
