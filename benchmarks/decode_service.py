"""A worker beside a bare loop over the same packs, with our decoders in both.

    Pillow loop   what a loop without us does: one process a core, full decode by Pillow
    bare loop     the same loop with our decoders; no text, no packs
    with texts    that, and the packs' records read, parsed and tokenised
    worker        one worker process on those cores, without transport: reads, decodes, tokenises
                  and builds packs
    with frames   that, and the frames with their checksums that would be sent
    stream        the real worker on those cores, its coordinator and planner, each a process, and a
                  client in another one that reads every pack by gRPC; these share the machine's
                  cores with the worker

All take turns; figures are medians, a ratio is the median of the ratios within a turn. A
stream's time begins before its session opens, so it wants more than a few packs.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decode_corpus import GRID, make_config, pictures_of, planned_packs, source_names, with_pictures
from decode_loops import bare_loop, bare_loop_with_texts, pillow_loop, worker
from figures import Figure
from measuring import SPAWN, Measured, cpu_seconds, in_processes, peak_bytes, usable_cores
from reports import Report, aligned

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.state_log import open_state
from dataservice.actors.worker import Worker
from dataservice.config import Config
from dataservice.core.fleet import CORES_A_WORKER
from dataservice.core.packspec import PackSpec
from dataservice.rpc.client import CoordinatorClient
from dataservice.rpc.server import start_server
from dataservice.wire.messages import GetStatus

LEAST_RATIO = 0.9
LIMIT_S = 60.0
"""For a service to come up."""
BASE = "bare loop"
MODES = ("Pillow loop", BASE, "with texts", "worker", "with frames", "stream")


@dataclass(kw_only=True)
class Group:
    """A source, or all of them together, on so many cores, and what was measured on it."""

    name: str
    cores: int
    packs: int
    images: int
    megapixels: float
    turns: list[dict[str, Measured]] = field(default_factory=list)

    def ratio(self, mode: str, base: str = BASE) -> float:
        """How many times the base's speed."""
        return statistics.median(turn[base].seconds / turn[mode].seconds for turn in self.turns)

    def median(self, mode: str, get: Callable[[Measured], float]) -> float:
        return statistics.median(get(turn[mode]) for turn in self.turns)

    def rows(self) -> Iterator[list[str]]:
        for mode in MODES:
            seconds = self.median(mode, lambda m: m.seconds)
            cpu_s = self.median(mode, lambda m: m.cpu_s)
            yield [
                mode,
                f"{self.images / seconds:.1f}",
                f"{self.packs / seconds:.2f}",
                f"{self.megapixels / seconds:.0f}",
                f"{self.ratio(mode):.2f}",
                f"{1000 * cpu_s / max(1, self.images):.2f}",
                f"{max(turn[mode].peak_bytes for turn in self.turns) / 1e6:.0f}",
            ]


# ---- with transport ------------------------------------------------------------------------------


def serve_coordinator(config: Config, endpoint: Any) -> None:
    async def serve() -> None:
        coordinator = Coordinator(config, PlannerProcess(), open_state(config))
        server = await start_server(coordinator=coordinator)
        await coordinator.start()
        endpoint.send(server.endpoint)
        await asyncio.to_thread(endpoint.recv)
        await server.stop(0)
        await coordinator.stop()

    asyncio.run(serve())


def serve_worker(coordinator: str, cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    asyncio.run(Worker(coordinator=coordinator, worker_id=uuid.uuid4().hex, node="n0").run())


@contextmanager
def running_coordinator(config: Config) -> Iterator[str]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_coordinator, args=(config, there))
    process.start()
    try:
        if not here.poll(LIMIT_S):
            raise SystemExit(f"the coordinator did not start within {LIMIT_S:g} s")
        yield here.recv()
        here.send("stop")
        process.join(20.0)
    finally:
        process.kill()
        process.join()


@contextmanager
def running_worker(coordinator: str, cores: Sequence[int]) -> Iterator[int]:
    """Yields its process number once the coordinator knows it."""
    process = SPAWN.Process(target=serve_worker, args=(coordinator, cores))
    process.start()
    try:
        await_worker(coordinator)
        assert process.pid is not None and process.is_alive()
        yield process.pid
    finally:
        process.kill()
        process.join()


def await_worker(coordinator: str) -> None:
    until = time.monotonic() + LIMIT_S
    with CoordinatorClient(coordinator) as client:
        while time.monotonic() < until:
            if json.loads(client.call(GetStatus(), 10.0).status)["workers"]:
                return
            time.sleep(0.1)
    raise SystemExit(f"no worker came within {LIMIT_S:g} s")


def stream(config: Config, num_packs: int, cores: Sequence[int]) -> Measured:
    """A service of its own: a worker that ended leaves nothing to the next."""
    from trainer_client import PackStream, ParallelLayout  # not above: no torch in the worker

    config = replace(config, state_dir=f"{config.state_dir}-{uuid.uuid4().hex}")
    with (
        running_coordinator(config) as coordinator,
        running_worker(coordinator, cores) as pid,
    ):
        cpu = cpu_seconds(pid)
        began = time.perf_counter()
        with PackStream(
            coordinator,
            job="benchmark",
            layout=ParallelLayout.data_parallel(0, 1),
            micro_steps=GRID.micro_steps,
        ) as batches:
            for _ in range(num_packs):
                next(batches)
            seconds = time.perf_counter() - began
            return Measured(
                seconds=seconds, cpu_s=cpu_seconds(pid) - cpu, peak_bytes=peak_bytes(pid)
            )


# ---- the run -------------------------------------------------------------------------------------


def measure(
    name: str, config: Config, specs: Sequence[PackSpec], cores: Sequence[int], turns: int
) -> Group:
    pictures = pictures_of(specs)
    group = Group(
        name=name,
        cores=len(cores),
        packs=len(specs),
        images=len(pictures),
        megapixels=sum(p.width * p.height for p in pictures) / 1e6,
    )
    number = len(cores)
    config = replace(config, workers=replace(config.workers, decode_threads=number))
    shares = [(config, specs[i::number]) for i in range(number)]
    each = [[core] for core in cores]
    for turn in range(turns):
        print(
            f"{name}: {len(specs)} packs, {len(pictures)} images, {number} cores, "
            f"turn {turn + 1} of {turns}",
            file=sys.stderr,
            flush=True,
        )
        group.turns.append(
            {
                "Pillow loop": in_processes(pillow_loop, shares, each),
                BASE: in_processes(bare_loop, shares, each),
                "with texts": in_processes(bare_loop_with_texts, shares, each),
                "worker": in_processes(worker, [(config, specs, False)], [cores]),
                "with frames": in_processes(worker, [(config, specs, True)], [cores]),
                "stream": stream(config, len(specs), cores),
            }
        )
    return group


def figures_of(group: Group) -> Iterator[Figure]:
    where = f"{group.name}, {group.cores} core" + "s" * (group.cores > 1)
    ratio = group.ratio("worker")
    yield Figure(
        name=f"worker over the bare loop: {where}",
        value=ratio,
        unit="x",
        target=f"at least {LEAST_RATIO}",
        reached=ratio >= LEAST_RATIO,
        note=f"over the bare loop with texts {group.ratio('worker', 'with texts'):.2f} x; with "
        f"frames {group.ratio('with frames'):.2f} x, with transport {group.ratio('stream'):.2f} x "
        "the bare loop",
    )


def run(corpus: Path, folder: Path, quick: bool) -> Report:
    names = source_names(corpus)
    cores = usable_cores()
    groups = [("all sources", names), *((n, [n]) for n in with_pictures(corpus, names))]
    head = ["", "images/s", "packs/s", "MP/s", "x bare", "CPU ms/image", "peak MB"]
    report = Report()
    for name, sources in groups:
        config = make_config(corpus, sources, folder / name, threads=1)
        specs = planned_packs(config, 40 if quick else 2000)
        for number in sorted({1, min(len(cores), CORES_A_WORKER)}):
            group = measure(name, config, specs, cores[:number], 1 if quick else 3)
            report.lines += [
                "",
                f"{name}, {number} of {len(cores)} cores: {group.packs} packs, {group.images} "
                f"images, {group.megapixels:.0f} MP, {len(group.turns)} turns",
                *aligned([head, *group.rows()]),
            ]
            report.figures += figures_of(group)
    return report
