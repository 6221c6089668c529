"""A worker stopped with SIGSTOP, connections and all: its lease ends, its clients learn of it at
once, and when it goes on it joins anew and serves again."""

from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import Readers, read_ranks
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.service_processes import ServiceProcesses
from support.until import until, workers_of

from dataservice.config import Config

STEPS = 30
BOUND_S = 10.0
"""Without word of the lease's end, a fetch runs into its own deadline of 15 s."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("local", [True, False])
def test_its_clients_go_elsewhere_when_its_lease_ends(
    config: Config, tmp_path: Path, local: bool
) -> None:
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    with nothing_leaks():
        with ServiceProcesses(config, tmp_path, workers=2) as service:
            until("two workers", lambda: len(workers_of(service)) == 2)
            seen = [0]

            def stop_one(_: Any) -> None:
                seen[0] += 1
                if seen[0] == 10:
                    service.signal("worker-0", signal.SIGSTOP)

            readers = read(service, stop_one, local=local)
            counters = service.status()["counters"]
            assert len(workers_of(service)) == 1
            service.signal("worker-0", signal.SIGCONT)
            until("it joins anew", lambda: len(workers_of(service)) == 2)
        assert not service.exits
    prove_same(clean, readers.deliveries)
    assert counters["workers_lost"] == 1
    assert counters["packs_rebuilt"] >= 1
    recovered_s = longest_gap(readers.deliveries)
    print(f"recovered in {recovered_s:.1f} s")
    assert recovered_s < BOUND_S


def test_where_all_are_stopped_ranks_wait_until_one_goes_on(config: Config, tmp_path: Path) -> None:
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    with nothing_leaks():
        with ServiceProcesses(config, tmp_path, workers=1) as service:
            until("a worker", lambda: workers_of(service))
            seen = [0]

            def go_on() -> None:
                until("its lease ends", lambda: not workers_of(service))
                service.signal("worker-0", signal.SIGCONT)

            thread = threading.Thread(target=go_on)

            def stop_it(_: Any) -> None:
                seen[0] += 1
                if seen[0] == 10:
                    service.signal("worker-0", signal.SIGSTOP)
                    thread.start()

            readers = read(service, stop_it)
            thread.join()
            counters = service.status()["counters"]
    prove_same(clean, readers.deliveries)
    assert counters["workers_lost"] == 1
    recovered_s = longest_gap(readers.deliveries)
    print(f"recovered in {recovered_s:.1f} s")
    assert recovered_s < BOUND_S


def read(service: ServiceProcesses, on_batch: Any, *, local: bool = True) -> Readers:
    return read_ranks(
        service.endpoint,
        job="test",
        dp_size=2,
        micro_steps=2,
        steps=STEPS,
        on_batch=on_batch,
        prefetch_packs=0,
        local=local,
    )
