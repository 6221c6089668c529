"""The coordinator's actor is killed and stopped on a Ray cluster of two data nodes: it comes again
at the same endpoint, its workers live on, and the ranks read on as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_config import demo_config
from support.harness import Readers, cluster_service, kill, listener, read_ranks, worker_pids
from support.until import until

from dataservice.actors import supervisor
from dataservice.actors.launch import Service
from dataservice.actors.state_log import open_state
from dataservice.errors import JobHeld, ServiceUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 20
LEASE_S = 20.0
"""Long, so that it is not its end that tells of a death."""


def read(service: Service, on_batch: Callable[[object], None] | None = None) -> Readers:
    return read_ranks(
        service.endpoint,
        job="test",
        dp_size=2,
        micro_steps=2,
        steps=STEPS,
        on_batch=on_batch,
        pause_s=0.05,
    )


class Kills:
    """Kills the coordinator's process once the batches come to `at`, and notes how long the next
    batch of a rank then takes."""

    def __init__(self, service: Service, at: tuple[int, ...]) -> None:
        self._service = service
        self._left = list(at)
        self._lock = threading.Lock()
        self._batches = 0
        self._last: dict[int, float] = {}
        self.longest_s = 0.0

    def __call__(self, batch: Any) -> None:
        with self._lock:
            self._batches += 1
            now, rank = time.monotonic(), batch.meta["dp_rank"]
            self.longest_s = max(self.longest_s, now - self._last.get(rank, now))
            self._last[rank] = now
            if self._left and self._batches >= self._left[0]:
                with suppress(LookupError):  # it is still coming up again
                    kill(listener(self._service.endpoint))
                    self._left.pop(0)


def status_or_none(service: Service) -> dict | None:
    try:
        return service.status()
    except ServiceUnavailable:
        return None


def test_coordinator_killed_while_ranks_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SILENT_S", 5.0)
    config = demo_config(
        tmp_path,
        workers={"count": 2, "decode_threads": 1},
        serving={"lease_s": LEASE_S, "port": 0},
    )
    with cluster_service(config) as (service, _):
        until("two workers", lambda: len(service.status()["workers"]) == 2)
        clean = read(service)
        workers = sorted(worker_pids(service))
        endpoint = service.endpoint
        kills = Kills(service, at=(9, 28))
        disturbed = read(service, kills)
        until("the coordinator is back", lambda: status_or_none(service) is not None)
        assert service.coordinator_restarts == 2
        assert service.endpoint == endpoint
        until("both workers are known again", lambda: len(service.status()["workers"]) == 2)
        assert sorted(worker_pids(service)) == workers
        assert service.status()["epoch"] == 3
        print(f"\nrecovered in {kills.longest_s:.1f} s (longest gap of a rank, two kills)")

        with pytest.raises(JobHeld, match=f"serving at {endpoint}"):
            open_state(config)
        frozen = listener(endpoint)
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        until("a stopped one is replaced", lambda: service.coordinator_restarts == 3, 90)
        print(f"a stopped coordinator is replaced after {time.monotonic() - began:.1f} s")
        assert not psutil.pid_exists(frozen)
        until("both workers are known again", lambda: len(service.status()["workers"]) == 2)
        assert sorted(worker_pids(service)) == workers

        kill(workers[0])
        began = time.monotonic()
        until("the loss", lambda: service.status()["counters"].get("workers_lost", 0) == 1)
        told_s = time.monotonic() - began
        print(f"a killed worker is known to be lost after {told_s:.1f} s")
        assert told_s < LEASE_S / 2
    assert disturbed.digests_of_packs() == clean.digests_of_packs()
    assert len(disturbed.deliveries) == len(clean.deliveries) == STEPS * 2 * 2
    assert not any(psutil.pid_exists(pid) for pid in workers)
