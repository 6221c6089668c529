"""A trainer slower than the service: what is in flight and held stays bounded at both ends."""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress
from pathlib import Path

import psutil
from support.demo_config import demo_config
from support.local_service import LocalService
from support.proof import clean_run, nothing_leaks, prove_same
from support.rank_processes import RankProcesses
from support.worker_process import WorkerProcesses

JOB, DP, MICRO = "test", 2, 2
STEPS = 12
READY_BYTES = 1 << 20
PREFETCH_PACKS = 2
GROWTH_BYTES = 24 << 20
"""Of a process's memory over the run: allocators' noise, far below what is built meanwhile."""


def resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def test_memory_is_flat_and_what_is_held_is_bounded(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path,
        staging={"cache_dir": None},
        workers={"ready_bytes": READY_BYTES},
        serving={"plan_ahead_steps": STEPS},
    )
    clean = clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)
    own = dataclasses.replace(config, state_dir=str(tmp_path / "other"))
    with (
        nothing_leaks(),
        LocalService(own, workers=0) as service,
        WorkerProcesses(
            service.endpoint, count=1, memory_bytes=None, codecs=[], folder=tmp_path
        ) as workers,
        RankProcesses(
            service.endpoint,
            tmp_path / "ranks",
            job=JOB,
            dp_size=DP,
            micro_steps=MICRO,
            steps=STEPS,
            pause_s=0.2,
            prefetch_packs=PREFETCH_PACKS,
        ) as ranks,
    ):
        ranks.wait_for_step(2)
        watched = [*workers.pids, *ranks.pids.values()]
        began = {pid: resident(pid) for pid in watched}
        held: list[int] = []
        while ranks.running:
            held += [worker["ready_bytes"] for worker in service.status()["workers"]]
            with suppress(psutil.NoSuchProcess):  # a rank has come to its end
                grown = {pid: resident(pid) - began[pid] for pid in watched}
                assert max(grown.values()) < GROWTH_BYTES, grown
            time.sleep(0.05)
        assert ranks.wait(60) == dict.fromkeys(range(DP), 0)
        stats = [ranks.stats(rank) for rank in range(DP)]
    prove_same(clean, ranks.deliveries())
    # a pack that a rank waits for is built whether it fits or not
    largest = max(one["received_bytes"] for one in stats) // (STEPS * MICRO) * 4
    assert 0 < max(held) <= READY_BYTES + DP * largest
    for one in stats:
        assert one["peak_held_packs"] <= PREFETCH_PACKS
        assert one["waited_s"] < 0.5 * STEPS * MICRO * 0.2
    peaks = [one["peak_held_bytes"] for one in stats]
    print(f"worker held {max(held)} bytes, bound {READY_BYTES}; ranks {peaks}")
