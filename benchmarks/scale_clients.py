"""The trainers and workers of benchmarks/scale.py: many in one process, each with a connection of
its own, as the real ones have. They ask what trainer_client and actors.worker ask, when these ask
it, and neither decode nor train.

    python benchmarks/scale_clients.py '{"kind": "ranks", ...}'

Invariants: says a JSON line when all have begun, answers each line of its input with one line of
figures since the line before, and ends with its input; its own event loop is watched, so that a
latency is known to be the coordinator's.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from typing import Any

from dataservice.actors.member import PULL_WAIT_S
from dataservice.core.spreading import ask_at, report_s
from dataservice.errors import DataServiceError, DeadlineExceeded, LeaseLost, ServiceUnavailable
from dataservice.rpc.aio import AsyncCoordinatorClient
from dataservice.wire.messages import (
    GetSteps,
    OpenSession,
    Progress,
    PullWork,
    RegisterWorker,
    StepCells,
)

TICK_S = 0.005
POLL_S, GRACE_S = 10.0, 60.0
REPORT_S = 5.0
"""As trainer_client.prefetch has it, which loads torch."""
SPREAD_S = 0.1
"""The ranks of a step come to their micro-steps within so many seconds of each other."""


class Figures:
    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self.calls: dict[str, list[float]] = defaultdict(list)
        self.late: list[float] = []
        self.errors: list[str] = []
        self.refused = 0
        """Calls that were tried again because the coordinator did not take them."""
        self.leases_lost = 0
        self.waited_s = 0.0

    async def call(self, client: AsyncCoordinatorClient, request: Any, *, poll: bool) -> Any:
        """`poll`: the coordinator may hold the answer back, so its time says nothing."""
        name, began = type(request).__name__, time.perf_counter()
        while True:
            try:
                return await client.call(request, GRACE_S)
            except (ServiceUnavailable, DeadlineExceeded):
                self.refused += 1
                await asyncio.sleep(random.uniform(0.1, 0.5))
            except LeaseLost:
                raise
            except DataServiceError as error:
                self.errors.append(f"{name}: {error}")
                raise
            finally:
                if not poll:
                    self.calls[name].append(time.perf_counter() - began)

    async def watch_loop(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.late.append(time.perf_counter() - began - TICK_S)

    def taken(self) -> dict[str, Any]:
        found = {
            "calls": self.calls,
            "late": self.late,
            "errors": self.errors[:5],
            "refused": self.refused,
            "leases_lost": self.leases_lost,
            "waited_s": self.waited_s,
        }
        self._start_anew()
        return found


class Rank:
    """Reads its cells a step ahead, as trainer_client.prefetch does."""

    def __init__(self, figures: Figures, options: dict[str, Any], rank: int) -> None:
        self._figures = figures
        self._options = options
        self._rank = rank
        self._client = AsyncCoordinatorClient(options["endpoint"])
        self._known: dict[int, StepCells] = {}
        self._session = 0
        self._asked_at = time.monotonic()
        self._report_s = report_s(options["dp_size"], REPORT_S)
        self._unreported_s = 0.0

    async def run(self, begun: asyncio.Event) -> None:
        await self._open()
        begun.set()
        micro_steps, step_s = self._options["micro_steps"], self._options["step_s"]
        jitter = random.Random(self._rank)
        asks_at = ask_at(self._rank, micro_steps)
        step = 0
        while True:
            await self._wait_for(step)
            started = time.monotonic()
            for micro_step in range(micro_steps):
                if micro_step == asks_at:
                    await asyncio.sleep(jitter.uniform(0, min(SPREAD_S, step_s / micro_steps)))
                    await self._ask(step + 1, (step, micro_step), wait_s=0.0)
                until = started + step_s * (micro_step + 1) / micro_steps
                while (left := until - time.monotonic()) > 0:
                    report = self._asked_at + self._report_s - time.monotonic()
                    if report <= 0:
                        await self._report((step, micro_step))
                        continue
                    await asyncio.sleep(min(left, report))
            self._known.pop(step)
            step += 1

    async def _open(self) -> None:
        while True:
            opened = await self._figures.call(
                self._client,
                OpenSession(
                    job=self._options["job"],
                    run_id="scale",
                    dp_rank=self._rank,
                    dp_size=self._options["dp_size"],
                    micro_steps=self._options["micro_steps"],
                    packs_per_cell=1,
                    state=None,
                    host=f"host-{self._rank // 8}",
                    wait_s=POLL_S,
                    pid=self._rank + 1,
                ),
                poll=True,
            )
            if opened.ready:
                self._session = opened.session
                return

    async def _wait_for(self, step: int) -> None:
        began = time.monotonic()
        wait_s = 0.0
        while step not in self._known:
            await self._ask(step, (step, 0), wait_s=wait_s)
            wait_s = POLL_S
        if step:
            self._figures.waited_s += time.monotonic() - began
            self._unreported_s += time.monotonic() - began

    async def _ask(self, first: int, done: tuple[int, int], *, wait_s: float) -> None:
        self._asked_at = time.monotonic()
        waited_s, self._unreported_s = self._unreported_s, 0.0
        steps = await self._figures.call(
            self._client,
            GetSteps(
                session=self._session,
                dp_rank=self._rank,
                first_step=first,
                count=1,
                done_step=done[0],
                done_micro_step=done[1],
                wait_s=wait_s,
                waited_s=waited_s,
            ),
            poll=wait_s > 0,
        )
        for cells in steps.steps:
            self._known[cells.step] = cells

    async def _report(self, done: tuple[int, int]) -> None:
        self._asked_at = time.monotonic()
        progress = Progress(
            session=self._session,
            dp_rank=self._rank,
            done_step=done[0],
            done_micro_step=done[1],
            waited_s=0.0,
        )
        await self._figures.call(self._client, progress, poll=False)


class SimulatedWorker:
    """Takes work and never builds it."""

    def __init__(self, figures: Figures, options: dict[str, Any], number: int) -> None:
        self._figures = figures
        self._id = f"worker-{number:04d}"
        self._port = 20000 + number
        self._node = f"node-{number % options['nodes']:03d}"
        self._client = AsyncCoordinatorClient(options["endpoint"])
        self._packs = 0

    async def run(self, begun: asyncio.Event) -> None:
        while True:
            joined = await self._figures.call(self._client, self._hello(), poll=False)
            begun.set()
            try:
                await self._work(joined.lease, min(PULL_WAIT_S, joined.lease_s / 2))
            except LeaseLost:
                self._figures.leases_lost += 1

    async def _work(self, lease: int, wait_s: float) -> None:
        session = sequence = 0
        while True:
            request = self._pull(lease, session, sequence, wait_s)
            work = await self._figures.call(self._client, request, poll=True)
            if work.session != session:
                session, sequence = work.session, 0
            self._packs += len(work.assignments)
            sequence = max([sequence, *(given.sequence for given in work.assignments)])

    def _hello(self) -> RegisterWorker:
        return RegisterWorker(
            worker_id=self._id,
            node=self._node,
            endpoint=f"10.0.0.1:{self._port}",
            decoder="simulated",
        )

    def _pull(self, lease: int, session: int, sequence: int, wait_s: float) -> PullWork:
        return PullWork(
            worker_id=self._id,
            lease=lease,
            session=session,
            after_sequence=sequence,
            wait_s=wait_s,
            ready_bytes=1 << 30,
            ready_packs=40,
            queued_packs=100,
            built_packs=self._packs,
            served_packs=self._packs,
            served_bytes=self._packs << 23,
            decode_s=1.5,
            read_origin_bytes=1 << 40,
            read_staged_bytes=1 << 40,
            images=self._packs * 16,
            memory_bytes=1 << 31,
        )


class Probe:
    """One rank's whole call, asked evenly by a process that does nothing else."""

    def __init__(self, figures: Figures, options: dict[str, Any], number: int) -> None:
        self._figures = figures
        self._options = options
        self._number = number
        self._client = AsyncCoordinatorClient(options["endpoint"])

    async def run(self, begun: asyncio.Event) -> None:
        begun.set()
        dp_size, gap_s = self._options["dp_size"], self._options["gap_s"]
        step = 0
        while True:
            await asyncio.sleep(random.uniform(0, 2 * gap_s))
            request = GetSteps(
                session=self._options["session"],
                dp_rank=random.randrange(dp_size),
                first_step=step,
                count=1,
                done_step=0,
                done_micro_step=0,
                wait_s=0.0,
            )
            try:
                await self._figures.call(self._client, request, poll=False)
            except DataServiceError:
                self._figures.errors.pop()
                step += 1  # it is over


KINDS = {"ranks": Rank, "workers": SimulatedWorker, "probe": Probe}


async def main(options: dict[str, Any]) -> None:
    figures = Figures()
    begun, tasks = [], []
    for number in range(*options["range"]):
        event = asyncio.Event()
        one = KINDS[options["kind"]](figures, options, number)
        tasks.append(asyncio.ensure_future(one.run(event)))
        begun.append(event.wait())
        if number % 64 == 63:
            await asyncio.sleep(0.05)
    tasks.append(asyncio.ensure_future(figures.watch_loop()))
    failed = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
    await asyncio.wait(
        [asyncio.ensure_future(asyncio.gather(*begun)), failed],
        return_when=asyncio.FIRST_COMPLETED,
    )
    say({"begun": not failed.done()})
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while await lines.readline():
        ended = sum(task.done() for task in tasks)
        say({**figures.taken(), "ended": ended})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
