"""SIGTERM to a worker and to the coordinator while ranks read: each says that it serves no more,
ends in order with 0, and costs the ranks nothing but the time until the next one is there."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import Readers, read_ranks
from support.health import NOT_SERVING, SERVING, watched_health
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.service_processes import ServiceProcesses
from support.until import until, workers_of

from dataservice.config import Config

STEPS = 30
GRACE_S = 10.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("job"))


def read(service: ServiceProcesses, on_batch: Any) -> Readers:
    return read_ranks(
        service.endpoint, job="test", dp_size=2, micro_steps=2, steps=STEPS, on_batch=on_batch
    )


def test_a_worker_hands_its_packs_over_and_leaves(config: Config, tmp_path: Path) -> None:
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    with nothing_leaks():
        with ServiceProcesses(config, tmp_path, workers=2) as service:
            until("two workers", lambda: len(workers_of(service)) == 2)
            (endpoint,) = (w["endpoint"] for w in workers_of(service) if "worker-0" in w["id"])
            with watched_health(endpoint) as health:
                until("its health", lambda: health == [SERVING])
                seen, ended = [0], []

                def end_it() -> None:
                    started = time.monotonic()
                    ended.append((service.remove("worker-0"), time.monotonic() - started))

                thread = threading.Thread(target=end_it)

                def end_one(_: Any) -> None:
                    seen[0] += 1
                    if seen[0] == 10:
                        thread.start()

                readers = read(service, end_one)
                thread.join(30)
            counters = service.status()["counters"]
            until("it has left", lambda: "has left" in service.log("coordinator"))
            log = service.log("coordinator")
    prove_same(clean, readers.deliveries)
    ((code, seconds),) = ended
    assert code == 0 and seconds < GRACE_S
    assert health == [SERVING, NOT_SERVING]
    assert counters["workers_retired"] == 1
    assert counters.get("workers_lost", 0) == counters.get("packs_suspected", 0) == 0
    assert "it was asked to end" in log and "is gone" not in log
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s, ended in {seconds:.1f} s")


def test_a_coordinator_ends_and_the_next_goes_on(config: Config, tmp_path: Path) -> None:
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    with nothing_leaks():
        with ServiceProcesses(config, tmp_path, workers=2) as service:
            until("two workers", lambda: len(workers_of(service)) == 2)
            with watched_health(service.endpoint) as health:
                until("its health", lambda: health == [SERVING])
                seen = [0]

                def end_it(_: Any) -> None:
                    seen[0] += 1
                    if seen[0] == 10:
                        service.signal("coordinator", signal.SIGTERM)

                readers = read(service, end_it)
            until("its exit", lambda: service.exits)
            assert service.exits == [("coordinator", 0)]
            assert health == [SERVING, NOT_SERVING]
            assert "goes on" in service.log("coordinator")
    prove_same(clean, readers.deliveries)
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")
