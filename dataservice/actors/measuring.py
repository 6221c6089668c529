"""What one machine does with a config's own data: plans steps, builds their packs as a worker does,
and reads a shard as a stager does, for a few seconds each.

Invariants: the packs are those of the run's first steps; nothing is written where the service
writes; a part takes no longer than it may, but for the one thing that it has begun.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dataservice.actors.build_queue import Job
from dataservice.actors.building import builders
from dataservice.actors.pack_specs import spec_of
from dataservice.actors.plan_messages import PlannedStep, StepRequest
from dataservice.actors.planner import Planner
from dataservice.actors.worker_tools import WorkerTools, encoded
from dataservice.config import Config
from dataservice.core.packspec import PackSpec
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError, ServiceUnavailable
from dataservice.storage.lazy import BlocksMissing
from dataservice.storage.objects import Store
from dataservice.wire.messages import CursorState

MICRO_STEPS = 16
"""Of the steps that are planned; the packs are the same in steps of any size."""
MOST_PACKS = 512
PIECE_BYTES = 8 << 20
MOST_READ_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """By one worker process."""

    packs: int
    images: int
    seconds: float
    cpu_s: float
    """Of all its threads."""
    decode_s: float
    """Of them, in pictures; time on the clock, so more than CPU time where cores are short."""
    threads: int
    """Decode threads."""
    pack_bytes: int
    """Of all packs, as they are handed to trainers before compression."""
    read_bytes: int
    """From origins."""
    holes: int
    again: bool
    """Whether the packs were too few, so that some were built twice, from the page cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    url: str
    read_bytes: int
    seconds: float
    streams: int


def planned(config: Config, *, most_s: float) -> list[PackSpec]:
    """The packs of the first steps in the order of need, without padding packs; `most_s` counts
    once the first step is there. ConfigError where there is none."""
    specs: list[PackSpec] = []
    until: float | None = None
    with contextlib.closing(Planner(config)) as planner:
        for step in _steps(planner, config):
            specs += [
                spec_of(packed)
                for packed, lane in zip(step.specs, _lanes(step), strict=True)
                if lane >= 0
            ]
            until = until or time.perf_counter() + most_s
            if len(specs) >= MOST_PACKS or time.perf_counter() > until:
                break
    if not specs:
        raise ConfigError("the plan has no pack to build: see `dataservice plan CONFIG`")
    return specs


def _lanes(step: PlannedStep) -> list[int]:
    data = step.lane
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def _steps(planner: Planner, config: Config) -> Iterator[PlannedStep]:
    grid = _grid(config)
    cursor: CursorState = planner.info().start
    while True:
        request = StepRequest(
            cursor=cursor,
            dp_size=grid.dp_size,
            micro_steps=grid.micro_steps,
            packs_per_cell=grid.packs_per_cell,
        )
        step = _counted(planner, request)
        if step.end:
            return
        yield step
        cursor = step.next_cursor


def _grid(config: Config) -> Grid:
    """The smallest that the plan can be divided into."""
    micro_steps = MICRO_STEPS
    if (parts := config.plan.segregate) is not None:
        micro_steps = parts.text.micro_steps + parts.vision.micro_steps
    return Grid(
        dp_size=config.plan.balance.sync_domain or 1, micro_steps=micro_steps, packs_per_cell=1
    )


def _counted(planner: Planner, request: StepRequest) -> PlannedStep:
    """With the blocks of a lazy index that it needs counted here."""
    while True:
        try:
            return planner.step(request)
        except BlocksMissing as missing:
            assert planner.lazy is not None
            failed = planner.lazy.count(missing.keys).failed
            if failed:
                raise ServiceUnavailable(failed[0].reason) from None


# ---- building ------------------------------------------------------------------------------------


def built(config: Config, specs: Sequence[PackSpec], *, most_s: float) -> Built:
    """In this process, with the threads that a worker would have here; from the first spec again
    where they are too few for `most_s` seconds. Raises what a build raises."""
    tools = WorkerTools(config, on_change=lambda: None, ask=_nobody, seat=lambda: ("bench", 0))
    with contextlib.closing(tools):
        tools.build(_job(0, specs[0]), {})  # what is loaded and compiled first is not counted
        read_before, decode_before = tools.reader.origin_bytes, tools.decode_s
        taken, totals, lock = itertools.count(), [0, 0, 0, 0], threading.Lock()
        cpu_before, began = time.process_time(), time.perf_counter()

        def build() -> None:
            while time.perf_counter() - began < most_s:
                number = next(taken)
                spec = specs[number % len(specs)]
                made = tools.build(_job(number, spec), {})
                figures = (
                    1,
                    sum(item.kept_images for item in spec.items),
                    encoded(made).size_bytes,
                    len(made.new_holes) if number < len(specs) else 0,
                )
                with lock:
                    totals[:] = [a + b for a, b in zip(totals, figures, strict=True)]

        threads = sum(not text_only for _, text_only in builders(tools.decode_threads))
        with ThreadPoolExecutor(threads) as pool:
            for running in [pool.submit(build) for _ in range(threads)]:
                running.result()
        packs, images, pack_bytes, holes = totals
        return Built(
            packs=packs,
            images=images,
            seconds=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu_before,
            decode_s=tools.decode_s - decode_before,
            threads=tools.decode_threads,
            pack_bytes=pack_bytes,
            read_bytes=tools.reader.origin_bytes - read_before,
            holes=holes,
            again=packs > len(specs),
        )


def _job(number: int, spec: PackSpec) -> Job:
    return Job(
        session=0,
        pack_id=spec.pack_id,
        need=(number, 0, 0),
        spec=spec,
        holes={},
        storage_holes=False,
        size_bytes=0,
    )


def _nobody(_request: object) -> Any:
    raise ServiceUnavailable("a measurement has no coordinator")


# ---- reading -------------------------------------------------------------------------------------


def read(config: Config, specs: Sequence[PackSpec], *, most_s: float) -> Read:
    """The largest shard that the packs need, from its origin in pieces side by side, as a stager
    copies it. Raises StorageError."""
    shard = max((s for spec in specs for s in spec.shards), key=lambda shard: shard.size_bytes)
    streams = config.staging.copy_streams
    size = min(shard.size_bytes, MOST_READ_BYTES)
    places, done, lock = iter(range(0, size, PIECE_BYTES)), [0], threading.Lock()
    with contextlib.closing(Store(attempts=config.staging.retries + 1)) as store:
        began = time.perf_counter()

        def copy() -> None:
            while time.perf_counter() - began < most_s:
                with lock:
                    offset = next(places, None)
                if offset is None:
                    return
                piece = store.read(
                    shard.url,
                    offset,
                    min(PIECE_BYTES, size - offset),
                    deadline_s=config.staging.deadline_s,
                )
                with lock:
                    done[0] += len(piece)

        with ThreadPoolExecutor(streams) as pool:
            for running in [pool.submit(copy) for _ in range(streams)]:
                running.result()
        seconds = time.perf_counter() - began
    return Read(url=shard.url, read_bytes=done[0], seconds=seconds, streams=streams)
