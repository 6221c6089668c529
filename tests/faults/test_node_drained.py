"""A data node of a Ray cluster is drained while ranks read: its lanes and workers move, nothing
comes up there, also after the coordinator was killed, and it can be taken back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.command import run
from support.demo_config import demo_config
from support.harness import Readers, cluster_service, kill, listener, read_ranks
from support.proof import clean_run, prove_same

from dataservice.actors.launch import Service
from dataservice.errors import ServiceUnavailable
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.draining import Drain

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

SIZES: dict[str, Any] = {"dp_size": 2, "micro_steps": 4, "steps": 12}
WORKERS = 3
"""Of which a node has room for two."""


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Also while the coordinator is being started again."""
    until = time.monotonic() + timeout_s
    while True:
        with suppress(ServiceUnavailable):
            if condition():
                return
        assert time.monotonic() < until
        time.sleep(0.2)


def workers_by_node(service: Service) -> dict[str, int]:
    found: dict[str, int] = {}
    for worker in service.status()["workers"]:
        found[worker["node"]] = found.get(worker["node"], 0) + 1
    return found


def test_nothing_is_lost_and_nothing_runs_on_a_drained_node(tmp_path: Path) -> None:
    config = demo_config(tmp_path, workers={"count": WORKERS, "decode_threads": 1, "num_cpus": 2.0})
    clean = clean_run(config, **SIZES)
    with cluster_service(config, data_nodes=2) as (service, _):
        wait_until(lambda: sum(workers_by_node(service).values()) == WORKERS)
        wait_until(lambda: len(service.status()["stagers"]) == 2)
        gone = max(workers_by_node(service).items(), key=lambda item: item[1])[0]
        codes: list[int] = []
        draining = threading.Thread(
            target=lambda: codes.append(
                run("drain", service.endpoint, "--node", gone[:12], "--wait", "--timeout-s", 90)
            )
        )
        once = threading.Lock()

        def begin(_: object) -> None:
            with once:
                if draining.ident is None:
                    draining.start()

        found: list[Readers] = []
        reading = threading.Thread(
            target=lambda: found.append(
                read_ranks(service.endpoint, job="test", pause_s=0.2, on_batch=begin, **SIZES)
            )
        )
        reading.start()
        wait_until(lambda: codes, timeout_s=100.0)
        assert codes == [0]
        status = service.status()
        assert gone not in workers_by_node(service)
        assert not any(s["lanes"] for s in status["stagers"] if s["node"] == gone)

        # of three workers two have room on the other node; the third waits, although the drained
        # one has free CPUs
        wait_until(lambda: service.status()["workers_without_room"] == 1)
        assert gone not in workers_by_node(service)
        wait_until(lambda: len(service.status()["stagers"]) == 1)

        kill(listener(service.endpoint))
        wait_until(lambda: service.coordinator_restarts == 1)
        wait_until(lambda: sum(workers_by_node(service).values()) == WORKERS - 1)
        wait_until(lambda: service.status()["drained_nodes"] == [gone])
        time.sleep(5.0)
        assert gone not in workers_by_node(service)
        reading.join(120)
        prove_same(clean, found[0].deliveries)

        with CoordinatorClient(service.endpoint) as client:
            client.call(Drain(node=gone, undo=True), 10.0)
        wait_until(lambda: workers_by_node(service).get(gone), timeout_s=90.0)
        wait_until(lambda: {s["node"] for s in service.status()["stagers"] if s["lanes"]} >= {gone})
