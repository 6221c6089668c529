"""Five minutes of training without pauses: what each process holds levels off."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from chaos.job import JOB, NODES, make_job
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses

SECONDS = 300.0
LEAST_STEPS = 4000
MOST_MB_A_1000_STEPS = 1.0
DP_SIZE, MICRO_STEPS = 2, 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_levels_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from flatness import Flatness

    job = make_job(tmp_path, cache_dir=tmp_path / "cache", seed=1)
    with (
        ServiceProcesses(
            job.config, tmp_path / "service", nodes=NODES, environment=job.environment
        ) as service,
        RankProcesses(
            service.endpoint,
            tmp_path / "ranks",
            job=JOB,
            dp_size=DP_SIZE,
            micro_steps=MICRO_STEPS,
            steps=None,
            save_every=100,
            grpc_ranks=[1],
            prefetch_packs=None,
        ) as ranks,
    ):
        ranks.wait_for_step(0)
        pids = service.pids | {f"rank {rank}": pid for rank, pid in ranks.pids.items()}
        (planner,) = psutil.Process(pids["coordinator"]).children()
        flatness = Flatness.of(pids | {"planner": planner.pid})
        until = time.monotonic() + SECONDS
        with (ranks.folder / "rank-0.jsonl").open("rb") as lines:
            steps = 0.0

            def step() -> int:
                nonlocal steps
                steps += lines.read().count(b"\n") / MICRO_STEPS
                return int(steps)

            flatness.watch(step, lambda: time.monotonic() < until and not ranks.codes)
        assert not ranks.codes, ranks.errors
        assert service.exits == []
    figures = flatness.figures()
    for figure in figures:
        print(f"{figure.name}: {figure.value:.3g} {figure.unit}")
    print(f"{steps:.0f} steps")
    assert steps > LEAST_STEPS
    grown = [f for f in figures if f.name.startswith("memory") and f.value > MOST_MB_A_1000_STEPS]
    assert grown == []
