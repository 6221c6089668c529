"""A worker killed with SIGKILL in the middle of a pack: before it builds, behind the decode, while
it hands the pack over."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.until import until, workers_of
from support.worker_process import WorkerProcesses

from dataservice.config import Config

STEPS = 20
BOUND_S = 30.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize(
    ("where", "local"),
    [
        ("before a build", True),
        ("behind a decode", True),
        ("before a reply", True),
        ("in a stream", False),
    ],
)
def test_its_packs_come_from_another_as_they_were(
    config: Config, tmp_path: Path, where: str, local: bool
) -> None:
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    with nothing_leaks():
        with (
            LocalService(config, workers=0) as service,
            WorkerProcesses(
                service.endpoint,
                count=2,
                memory_bytes=None,
                codecs=[],
                folder=tmp_path,
                dies=(where, 5),
            ) as processes,
        ):
            until("two workers", lambda: len(workers_of(service)) == 2)
            readers = read_ranks(
                service.endpoint, job="test", dp_size=2, micro_steps=2, steps=STEPS, local=local
            )
            counters = service.status()["counters"]
            exits = list(processes.exits)
    prove_same(clean, readers.deliveries)
    assert exits == [-signal.SIGKILL]
    assert counters["workers_lost"] == 1
    assert counters["packs_rebuilt"] >= 1
    recovered_s = longest_gap(readers.deliveries)
    print(f"recovered in {recovered_s:.1f} s")
    assert recovered_s < BOUND_S
