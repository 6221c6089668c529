"""Workers killed while they serve their host through shared memory: packs as if none had been."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.demo_config import demo_config
from support.harness import kill, listener, read_ranks
from support.local_service import LocalService
from support.worker_process import WorkerProcesses

JOB = "test"


def test_kills_change_nothing(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    with LocalService(config) as service:
        clean = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=None)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "other"))
    seen, victims, lock = [0], [], threading.Lock()
    with (
        LocalService(config, workers=0) as service,
        WorkerProcesses(
            service.endpoint, count=2, memory_bytes=None, codecs=[], folder=tmp_path
        ) as processes,
    ):

        def kill_some(_: Any) -> None:
            with lock:
                seen[0] += 1
                if seen[0] in (10, 30):
                    victims.append(serving(service, victims))
                    kill(victims[-1])

        readers = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=None, on_batch=kill_some
        )
        until = time.monotonic() + 30.0
        while len(processes.exits) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    assert processes.exits == [-signal.SIGKILL] * 2
    assert readers.digests_of_packs() == clean.digests_of_packs()
    assert readers.local_packs == len(readers.deliveries)


def serving(service: LocalService, victims: list[int]) -> int:
    """The process of a worker that the coordinator knows and nobody killed, once there is one."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        for worker in service.status()["workers"]:
            with suppress(LookupError):
                if (pid := listener(worker["endpoint"])) not in victims:
                    return pid
        time.sleep(0.05)
    raise AssertionError("no worker came")
