"""A real coordinator and workers over data in memory, for the tests of clients and trainers.

Invariants: everything a client sees comes over gRPC from this process; no Ray, no files; a pack
goes to the cell that the plan says, or of listed packs `placement`; all threads end with the block.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from dataservice.core.settings import Grid, PlanSettings
from dataservice.errors import DataServiceError, ResumeRefused, SessionFenced
from dataservice.wire.codec import encode_pack
from dataservice.wire.messages import (
    CursorState,
    GetSteps,
    Ok,
    OpenSession,
    PackPlace,
    Progress,
    SessionOpened,
    StepCells,
    Steps,
    StreamPack,
)
from trainer_client.testing.plan import FAKE_PLAN, PlannedPacks
from trainer_client.testing.samples import FakeSample
from trainer_client.testing.steps import (
    FakeStep,
    ListedPacks,
    PackSource,
    Placement,
    arrival_order,
)
from trainer_client.testing.synthetic import FAKE_INFO, FakePack

try:
    from dataservice.rpc.server import RunningServer, start_server
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"trainer_client.testing needs {error.name}: pip install grpcio-health-checking",
        name=error.name,
    ) from error


Result = TypeVar("Result")


class FakeService:
    """Serves `packs` inside a `with` block; `endpoint` is what a PackStream wants.

        with FakeService.of_plan({"talks": made_up_samples(200)}) as service:
            stream = PackStream(service.endpoint, job="test", layout=..., micro_steps=4)

    A step is handed out while it is less than `ahead_steps` beyond the slowest rank. Faults are
    made by `corrupt`, `kill_worker`, `hold_from`; `requests`, `done` and `waited_s` tell what
    clients did.
    """

    def __init__(
        self,
        packs: Sequence[FakePack] | PackSource,
        *,
        placement: Placement = arrival_order,
        drop_remainder: bool = False,
        ahead_steps: int = 8,
        num_workers: int = 1,
        frame_bytes: int = 1 << 20,
        info: SessionOpened = FAKE_INFO,
    ) -> None:
        """`placement`, `drop_remainder` and `info` are those of listed packs; a source has its
        own."""
        self._source: PackSource = (
            ListedPacks(packs, placement=placement, drop_remainder=drop_remainder, info=info)
            if isinstance(packs, Sequence)
            else packs
        )
        self.hold_from: int | None = None
        """Steps from this one on are not handed out."""
        self.frame_delay_s = 0.0
        """Pause of a worker after every frame."""
        self.requests: list[tuple[int, str]] = []
        """(dp_rank, pack_id) of every StreamPack."""
        self.failed: list[str] = []
        """Endpoints that clients reported."""
        self.done: dict[int, tuple[int, int]] = {}
        """By rank: what it said it yielded."""
        self.waited_s: dict[int, float] = {}
        self.closed: set[int] = set()
        """Ranks that said goodbye."""
        self.info = self._source.info
        self.frame_bytes = frame_bytes
        self.corrupt_left: dict[str, int] = {}
        self._ahead_steps, self._num_workers = ahead_steps, num_workers
        self._steps: list[FakeStep] = []
        """Of the open session, from its first one on, as far as they were asked for."""
        self._at_end = False
        """Whether no step is behind them."""
        self._session, self._run_id = 0, ""
        self._old_runs: set[str] = set()
        self._joined: dict[tuple[int, int], OpenSession] = {}
        """By rank and peer."""
        self._request: OpenSession | None = None
        self._workers: list[_Worker] = []

    @classmethod
    def of_plan(
        cls,
        samples: Mapping[str, Sequence[FakeSample]],
        plan: PlanSettings = FAKE_PLAN,
        *,
        seed: int = 0,
        ahead_steps: int = 8,
        num_workers: int = 1,
    ) -> Self:
        """What the service itself would serve of these samples by source: order, packing, balance,
        phases, segregation, resume and remainder are the planner's.

        `plan.sources` may be empty: all sources, alike. `seed` is that of made-up pixels. Raises
        ConfigError for settings that cannot be planned with.
        """
        source = PlannedPacks(samples, plan, seed=seed)
        return cls(source, ahead_steps=ahead_steps, num_workers=num_workers)

    # ---- life and faults ----

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-service")
        self._thread.start()
        self._server = self._wait(start_server(coordinator=self))
        self.endpoint = self._server.endpoint
        for _ in range(self._num_workers):
            self.add_worker()
        return self

    def __exit__(self, *_exc: object) -> None:
        for worker in list(self._workers):
            self.kill_worker(worker.endpoint)
        self._wait(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def add_worker(self) -> str:
        """Start one more worker; its endpoint. Packs not yet handed out go to it as well."""
        worker = _Worker(self)
        worker.server = self._wait(start_server(data=worker))
        self._workers.append(worker)
        return worker.endpoint

    def kill_worker(self, endpoint: str) -> None:
        """Its streams break off and its port is closed."""
        worker = next(worker for worker in self._workers if worker.endpoint == endpoint)
        self._workers.remove(worker)
        self._wait(worker.server.stop(0))

    @property
    def workers(self) -> list[str]:
        return [worker.endpoint for worker in self._workers]

    def corrupt(self, pack_id: str, *, times: int = 1) -> None:
        """Flip a byte in the next answers for this pack."""
        self.corrupt_left[pack_id] = times

    # ---- plan ----

    @property
    def _grid(self) -> Grid:
        assert self._request is not None
        return Grid(
            dp_size=self._request.dp_size,
            micro_steps=self._request.micro_steps,
            packs_per_cell=self._request.packs_per_cell,
        )

    def _planned(self, step: int) -> FakeStep | None:
        """A step of the open session; None behind the last."""
        while step >= self._first.step + len(self._steps) and not self._at_end:
            cursor = self._steps[-1].next_cursor if self._steps else self._first
            found = self._source.step(cursor, self._grid)
            self._at_end = found is None or found.next_step is None
            self._steps += [] if found is None else [found]
        place = step - self._first.step
        return self._steps[place] if place < len(self._steps) else None

    @property
    def _first(self) -> CursorState:
        assert self._request is not None
        state = self._request.state
        return self._source.start() if state is None else state.cursor

    @property
    def _end_step(self) -> int:
        """-1 while unknown."""
        return self._first.step + len(self._steps) if self._at_end else -1

    def step(self, step: int, dp_rank: int) -> StepCells:
        """What a rank of the open session is given of a step that exists."""
        grid, planned = self._grid, self._planned(step)
        assert planned is not None
        images = planned.images(grid)
        cells = tuple(
            tuple(
                self._place(planned, int(i), dp_rank)
                for i in np.flatnonzero((planned.micro_step == m) & (planned.dp_rank == dp_rank))
            )
            for m in range(grid.micro_steps)
        )
        return StepCells(
            step=step,
            cursor=planned.cursor,
            next_cursor=planned.next_cursor,
            cells=cells,
            settings=planned.settings,
            next_step=planned.next_step,
            loss_tokens=planned.loss_tokens,
            num_images=tuple(images[:, dp_rank].tolist()),
            ranks_without_images=tuple((images == 0).sum(axis=1).tolist()),
        )

    def _place(self, planned: FakeStep, i: int, dp_rank: int) -> PackPlace:
        return PackPlace(
            pack_id=planned.pack_ids[i],
            number=int(planned.numbers[i]),
            endpoint=self._workers[dp_rank % len(self._workers)].endpoint,
            size_bytes=int(planned.size_bytes[i]),
        )

    def frames(self, pack_id: str) -> list[bytes]:
        """A pack as a worker sends it, with the faults asked for."""
        pack = self._source.pack(pack_id)
        frames = encode_pack(
            pack.arrays, pack.meta | {"pack_id": pack_id}, frame_bytes=self.frame_bytes
        )
        if self.corrupt_left.get(pack_id, 0) > 0:
            self.corrupt_left[pack_id] -= 1
            frames[-1] = frames[-1][:-1] + bytes([frames[-1][-1] ^ 1])
        return frames

    # ---- coordinator service ----

    async def open_session(self, request: OpenSession) -> SessionOpened:
        if request.run_id != self._run_id:
            self._start_session(request)
        self._joined[request.dp_rank, request.peer] = request
        deadline = time.monotonic() + request.wait_s
        while True:
            if request.run_id != self._run_id:
                raise SessionFenced(f"run {request.run_id} was replaced by run {self._run_id}")
            places = itertools.product(range(request.dp_size), range(request.peers))
            missing = sorted({rank for rank, peer in places if (rank, peer) not in self._joined})
            if not missing:
                break
            if time.monotonic() >= deadline:
                return SessionOpened(ready=False, missing_ranks=tuple(missing))
            await asyncio.sleep(0.01)
        self._check_states()
        self._planned(self._first.step)
        return replace(
            self.info,
            session=self._session,
            first_step=self._first.step,
            first_micro_step=request.state.micro_step if request.state else 0,
            host_peers=tuple(
                peer
                for (rank, peer), other in sorted(self._joined.items())
                if rank == request.dp_rank and other.host == request.host
            ),
        )

    def _start_session(self, request: OpenSession) -> None:
        if request.run_id in self._old_runs:
            raise SessionFenced(f"run {request.run_id} was replaced by run {self._run_id}")
        self._old_runs.add(self._run_id)
        self._session, self._run_id, self._request = self._session + 1, request.run_id, request
        self._joined, self.done, self.waited_s, self.closed = {}, {}, {}, set()
        self._steps, self._at_end = [], False

    def _check_states(self) -> None:
        states = [joined.state for joined in self._joined.values()]
        if any(state != states[0] for state in states):
            raise ResumeRefused("the ranks present different states; load the same checkpoint")
        if states[0] is None:
            return
        state, grid = states[0], self._grid
        if state.plan_digest != self.info.plan_digest:
            raise ResumeRefused(
                f"the state is of plan {state.plan_digest}, the service has plan "
                f"{self.info.plan_digest}; start the service with the config of the checkpoint"
            )
        old = Grid(
            dp_size=state.dp_size,
            micro_steps=state.micro_steps,
            packs_per_cell=state.packs_per_cell,
        )
        if state.micro_step and old != grid:
            raise ResumeRefused(f"the state is inside a step of {old}; it cannot go on with {grid}")

    async def get_steps(self, request: GetSteps) -> Steps:
        self._note(request)
        self.failed += request.failed
        deadline = time.monotonic() + request.wait_s
        while True:
            self._check_session(request.session)
            limit, blocked_by = self._limit()
            stop = min(request.first_step + request.count, limit)
            at_end = self._planned(request.first_step) is None
            if request.first_step < stop or at_end or time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.01)
        asked = range(request.first_step, stop)
        wanted = [step for step in asked if self._planned(step) is not None]
        return Steps(
            steps=tuple(self.step(step, request.dp_rank) for step in wanted),
            end_step=self._end_step,
            blocked_by=blocked_by if not wanted and not at_end else "",
        )

    def _limit(self) -> tuple[int, str]:
        """The first step that is not handed out now, and why."""
        slowest = min(range(self._grid.dp_size), key=lambda rank: self.done.get(rank, (-1, 0)))
        at = self.done.get(slowest, (self._first.step, 0))[0]
        limits = [(at + self._ahead_steps, f"rank {slowest} is at step {at}")]
        if self.hold_from is not None:
            limits.append((self.hold_from, "the test"))
        if not self._workers:
            limits.append((0, "no worker is alive"))
        return min(limits)

    async def report_progress(self, request: Progress) -> Ok:
        self._note(request)
        if request.closing:
            self.closed.add(request.dp_rank)
        return Ok()

    def _note(self, request: GetSteps | Progress) -> None:
        self._check_session(request.session)
        rank = request.dp_rank
        self.done[rank] = request.done_step, request.done_micro_step
        self.waited_s[rank] = self.waited_s.get(rank, 0.0) + request.waited_s

    def _check_session(self, session: int) -> None:
        if session != self._session:
            raise SessionFenced(f"session {session} was replaced by session {self._session}")

    async def _not_served(self, request: Any) -> Any:
        raise DataServiceError(f"a FakeService does not answer {type(request).__name__}")

    register_worker = pull_work = get_assignment = report_holes = report_pack_failed = _not_served
    report_counts = get_roots = register_stager = pull_staging = _not_served
    get_status = scale = drain = _not_served


class _Worker:
    """One endpoint that streams packs."""

    server: RunningServer

    def __init__(self, service: FakeService) -> None:
        self._service = service

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    async def stream_pack(self, request: StreamPack) -> AsyncIterator[bytes]:
        service = self._service
        service._check_session(request.session)
        service.requests.append((request.dp_rank, request.pack_id))
        for frame in service.frames(request.pack_id):
            yield frame
            await asyncio.sleep(service.frame_delay_s)
