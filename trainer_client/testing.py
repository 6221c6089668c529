"""A real coordinator and workers over packs in memory, for the tests of clients and trainers.

Invariants: everything a client sees comes over gRPC from this process; no Ray, no files; a pack
goes to the cell that `placement` says, in the order of the list; all threads end with the block.
Needs grpcio-health-checking besides the base install (the `test` extra has it).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dataservice.core.settings import Grid
from dataservice.errors import DataServiceError, ResumeRefused, SessionFenced
from dataservice.rpc.server import RunningServer, start_server
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
from trainer_client.batch import MicroBatch
from trainer_client.stream import PackStream
from trainer_client.synthetic import (
    FAKE_INFO,
    FakePack,
    padding_pack,
    synthetic_packs,
    with_hole,
)

__all__ = [
    "FAKE_INFO",
    "FakePack",
    "FakeService",
    "arrival_order",
    "assert_resume_identical",
    "assert_same_batches",
    "balanced",
    "padding_pack",
    "read_all",
    "synthetic_packs",
    "with_hole",
]


Placement = Callable[[NDArray[np.int64], Grid], tuple[NDArray[Any], NDArray[Any]]]
"""(cost int64[M], grid) -> (micro_step[M], dp_rank[M])."""
Result = TypeVar("Result")

# ---- placement ----------------------------------------------------------------------------------


def arrival_order(cost: NDArray[np.int64], grid: Grid) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pack i to micro-step i // (R*k), rank (i // k) % R."""
    cell = np.arange(len(cost)) // grid.packs_per_cell
    return cell // grid.dp_size, cell % grid.dp_size


def balanced(cost: NDArray[np.int64], grid: Grid) -> tuple[NDArray[Any], NDArray[Any]]:
    """As the service places packs by default (`dataservice.core.balance.assign`)."""
    from dataservice.core.balance import assign

    placed = assign(
        cost,
        np.full(len(cost), -1),
        dp_size=grid.dp_size,
        micro_steps=grid.micro_steps,
        packs_per_cell=grid.packs_per_cell,
    )
    return placed.micro_step, placed.dp_rank


# ---- the service --------------------------------------------------------------------------------


class FakeService:
    """Serves `packs` inside a `with` block; `endpoint` is what a PackStream wants.

    A step is handed out while it is less than `ahead_steps` beyond the slowest rank. Faults are
    made by `corrupt`, `kill_worker`, `hold_from`; `requests`, `done` and `waited_s` tell what
    clients did.
    """

    def __init__(
        self,
        packs: Sequence[FakePack],
        *,
        placement: Placement = arrival_order,
        drop_remainder: bool = False,
        ahead_steps: int = 8,
        num_workers: int = 1,
        frame_bytes: int = 1 << 20,
        info: SessionOpened = FAKE_INFO,
    ) -> None:
        self.packs = list(packs)
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
        self.info = info
        self.frame_bytes = frame_bytes
        self.corrupt_left: dict[str, int] = {}
        self._placement, self._drop_remainder = placement, drop_remainder
        self._ahead_steps, self._num_workers = ahead_steps, num_workers
        self._padding = padding_pack(info)
        self._session, self._run_id = 0, ""
        self._old_runs: set[str] = set()
        self._joined: dict[tuple[int, int], OpenSession] = {}
        """By rank and peer."""
        self._request: OpenSession | None = None
        self._workers: list[_Worker] = []

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
        self._thread.join()
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

    def _cursor(self, step: int) -> CursorState:
        first = self._first
        number = first.next_pack[0] + (step - first.step) * self._grid.num_packs
        number = min(number, len(self.packs))
        return replace(first, step=step, next_pack=(number,), lanes=((0, number),))

    @property
    def _first(self) -> CursorState:
        assert self._request is not None
        if self._request.state is not None:
            return self._request.state.cursor
        return CursorState(
            step=0,
            phase=0,
            phase_digest=self.info.plan_digest,
            next_pack=(0,),
            lanes=((0, 0),),
            next_lane=(0,),
            lane_homes=(-1,),
        )

    @property
    def _end_step(self) -> int:
        left = len(self.packs) - self._first.next_pack[0]
        size = self._grid.num_packs
        return self._first.step + (left // size if self._drop_remainder else -(-left // size))

    def step(self, step: int, dp_rank: int) -> StepCells:
        """What a rank of the open session is given of a step."""
        grid, cursor, end = self._grid, self._cursor(step), self._cursor(step + 1)
        numbers = np.full(grid.num_packs, -1)
        first, stop = cursor.next_pack[0], end.next_pack[0]
        numbers[: stop - first] = range(first, stop)
        packs = [self.packs[i] if i >= 0 else self._padding for i in numbers]
        images = np.array([pack.num_images for pack in packs])
        cost = np.array([pack.cost for pack in packs], np.int64)
        micro_step, rank = self._placement(cost, grid)
        by_cell = np.zeros((grid.micro_steps, grid.dp_size), np.int64)
        np.add.at(by_cell, (micro_step, rank), images)
        cells = tuple(
            tuple(
                self._place(int(numbers[i]), packs[i], dp_rank)
                for i in np.flatnonzero((micro_step == m) & (rank == dp_rank))
            )
            for m in range(grid.micro_steps)
        )
        return StepCells(
            step=step,
            cursor=cursor,
            next_cursor=end,
            cells=cells,
            pack_length=self.info.pack_length,
            loss_tokens=sum(pack.loss_tokens for pack in packs),
            num_images=tuple(by_cell[:, dp_rank].tolist()),
            ranks_without_images=tuple((by_cell == 0).sum(axis=1).tolist()),
        )

    def _place(self, number: int, pack: FakePack, dp_rank: int) -> PackPlace:
        return PackPlace(
            pack_id=f"0.0.{number}" if number >= 0 else f"pad.{self.info.pack_length}",
            number=number,
            endpoint=self._workers[dp_rank % len(self._workers)].endpoint,
            size_bytes=pack.size_bytes,
        )

    def frames(self, pack_id: str) -> list[bytes]:
        """A pack as a worker sends it, with the faults asked for."""
        is_padding = pack_id.startswith("pad.")
        pack = self._padding if is_padding else self.packs[int(pack_id.split(".")[2])]
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
            at_end = request.first_step >= self._end_step
            if request.first_step < stop or at_end or time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.01)
        wanted = range(request.first_step, stop)
        return Steps(
            steps=tuple(self.step(step, request.dp_rank) for step in wanted),
            end_step=self._end_step,
            blocked_by=blocked_by if not wanted and not at_end else "",
        )

    def _limit(self) -> tuple[int, str]:
        """The first step that is not handed out now, and why."""
        slowest = min(range(self._grid.dp_size), key=lambda rank: self.done.get(rank, (-1, 0)))
        at = self.done.get(slowest, (self._first.step, 0))[0]
        limits = [(self._end_step, ""), (at + self._ahead_steps, f"rank {slowest} is at step {at}")]
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
    report_counts = get_roots = register_stager = pull_staging = get_status = scale = _not_served


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


# ---- checks -------------------------------------------------------------------------------------


def assert_same_batches(got: Sequence[MicroBatch], expected: Sequence[MicroBatch]) -> None:
    """Same addresses, same packs, same tensors; only the seconds waited may differ."""
    assert len(got) == len(expected), f"{len(got)} batches, expected {len(expected)}"
    for a, b in zip(got, expected, strict=True):
        where = f"step {b.step} micro-step {b.micro_step}"
        assert a.meta | {"waited_s": 0.0} == b.meta | {"waited_s": 0.0}, where
        assert a.is_last_micro_step == b.is_last_micro_step, where
        assert a.keys() == b.keys(), where
        for name, value in b.items():
            same = torch.equal(a[name], value) if torch.is_tensor(value) else a[name] == value
            assert same, f"{where}: {name} differs"


def assert_resume_identical(
    make_stream: Callable[[], PackStream], cut: int, expected: Sequence[MicroBatch] | None = None
) -> None:
    """A stream stopped after `cut` batches and continued from its state gives what one run gives.

    `make_stream` makes a new stream of a job with one rank; `expected` saves reading it whole.
    """
    if expected is None:
        with make_stream() as stream:
            expected = list(stream)
    with make_stream() as stream:
        before = [batch for _, batch in zip(range(cut), stream, strict=False)]
        state = json.loads(json.dumps(stream.state_dict()))
    with make_stream() as stream:
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        rest = list(stream)
        assert stream.state_dict() == state or rest
    assert_same_batches(before + rest, expected)


def read_all(streams: Sequence[PackStream], timeout_s: float = 60.0) -> list[list[MicroBatch]]:
    """Every stream to its end, each in a thread, as the ranks of a job; batches by stream."""
    results: list[list[MicroBatch]] = [[] for _ in streams]
    errors: list[BaseException] = []

    def read(stream: Iterator[MicroBatch], into: list[MicroBatch]) -> None:
        try:
            into.extend(stream)
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    threads = [
        threading.Thread(target=read, args=(iter(stream), into))
        for stream, into in zip(streams, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), f"a stream did not end within {timeout_s} s"
    if errors:
        raise errors[0]
    return results
