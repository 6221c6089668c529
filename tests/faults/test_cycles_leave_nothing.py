"""Fifty jobs, one after another: opened, read, closed; nothing is left of them."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import psutil
import pytest
from support.demo_config import demo_config
from support.harness import Delivery, read_ranks
from support.local_service import LocalService
from support.proof import clean_run, nothing_leaks, prove_same
from support.service_processes import ServiceProcesses
from support.until import until

from dataservice.config import Config
from trainer_client import PackStream, ParallelLayout

CYCLES = 50
WARM_CYCLES = 10
"""Until threads and connections that are kept have been made."""
FEW = 5
"""More threads that gRPC's pools may have under load; one left of each client would be 50."""
STEPS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("job"))


def service_cycle(config: Config, folder: Path) -> list[Delivery]:
    config = dataclasses.replace(config, state_dir=str(folder))
    with LocalService(config) as service:
        return read_ranks(
            service.endpoint, job="test", dp_size=1, micro_steps=1, steps=STEPS
        ).deliveries


def client_cycle(endpoint: str, *, steps: int, close: bool) -> bool:
    stream = PackStream(
        endpoint,
        job="test",
        layout=ParallelLayout.data_parallel(0, 1),
        micro_steps=1,
        timeout_s=60.0,
    )
    got = [next(stream).step for _ in range(steps)]
    if close:
        stream.close()
    return got == list(range(steps))


def held(service: ServiceProcesses) -> dict[str, tuple[int, int, int]]:
    """(descriptors, threads, children) of each process of the service."""
    found = {}
    for name, pid in service.pids.items():
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        found[name] = (process.num_fds(), process.num_threads(), len(children))
    return found


def test_of_a_client(config: Config, tmp_path: Path) -> None:
    """Every other one drops its stream and does not close it."""
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    with ServiceProcesses(config, tmp_path, workers=1) as service:
        for _ in range(WARM_CYCLES):
            client_cycle(service.endpoint, steps=10, close=True)
        gc.collect()
        before = held(service)
        sessions = service.status()["counters"]["sessions"]
        with nothing_leaks():
            for cycle in range(CYCLES):
                assert client_cycle(service.endpoint, steps=STEPS, close=cycle % 2 == 0)
            gc.collect()
        assert service.status()["counters"]["sessions"] - sessions == CYCLES
        most = {name: (fds, threads + FEW, kids) for name, (fds, threads, kids) in before.items()}
        until(
            f"no process of the service holds more than {most}",
            lambda: all(
                now <= then
                for name, figures in held(service).items()
                for now, then in zip(figures, most[name], strict=True)
            ),
            timeout_s=20.0,
        )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_of_a_service(config: Config, tmp_path: Path) -> None:
    clean = clean_run(config, dp_size=1, micro_steps=1, steps=STEPS)
    service_cycle(config, tmp_path / "first")
    with nothing_leaks():
        for number in range(CYCLES):
            prove_same(clean, service_cycle(config, tmp_path / str(number)))
        gc.collect()
