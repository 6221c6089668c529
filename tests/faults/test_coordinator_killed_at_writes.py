"""A coordinator that is killed at every kind of write to its state folder, one after the other,
while two ranks read: they get what an undisturbed run gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.dying_coordinator import DyingCoordinator
from support.harness import read_ranks
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.service_processes import free_port
from support.worker_process import WorkerProcesses

SIZES = {"dp_size": 2, "micro_steps": 1}
STEPS = 240
RECORDS = ("session", "homes", "planned", "done", "hole")
REWRITTEN = ("head", "epoch", "fenced", "session", "homes", "planned", "hole")
CALLS = ("write", "half", "fsync")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_kind_of_write(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path, plan={"pack_length": 1024, "epochs": 20}, staging={"cache_dir": None}
    )
    clean = clean_run(config, **SIZES, steps=STEPS)
    assert any(delivery.holes for delivery in clean.deliveries)
    coordinator = DyingCoordinator(config, tmp_path, port=free_port())

    def arm(_: Any) -> None:
        coordinator.arm()

    with nothing_leaks(), coordinator:
        with WorkerProcesses(
            coordinator.endpoint, count=1, memory_bytes=None, codecs=(), folder=tmp_path
        ):
            readers = read_ranks(
                coordinator.endpoint,
                job=config.job,
                **SIZES,
                steps=STEPS,
                timeout_s=500.0,
                on_batch=arm,
            )
        deaths = coordinator.deaths
    print(deaths)
    print(f"{len(deaths)} kills, recovered from all in {longest_gap(readers.deliveries):.1f} s")
    expected = {f"journal:{record}:{call}" for record in RECORDS for call in CALLS}
    expected |= {f"journal.new:{record}:{call}" for record in REWRITTEN for call in CALLS[:2]}
    expected |= {f"journal.new:{last}:fsync" for last in ("head", "planned")}
    expected |= {f"owner:head:{call}" for call in CALLS}
    expected |= {"owner:rename", "journal:replace", "folder:planned:fsync"}
    assert sorted(expected - set(deaths)) == []
    assert len(set(deaths)) == len(deaths) == coordinator.exits.count(-9)
    prove_same(clean, readers.deliveries)
