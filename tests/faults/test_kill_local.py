"""Workers killed while they serve their host through shared memory: packs as if none had been."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.demo_config import demo_config
from support.harness import kill, read_ranks
from support.local_service import LocalService
from support.worker_process import WorkerProcesses

JOB = "test"


def test_kills_change_nothing(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    with LocalService(config) as service:
        clean = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=None)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "other"))
    seen, victims = [0], []
    with (
        LocalService(config, workers=0) as service,
        WorkerProcesses(
            service.endpoint, count=2, memory_bytes=None, codecs=[], folder=tmp_path
        ) as processes,
    ):

        def kill_some(_: Any) -> None:
            seen[0] += 1
            if seen[0] in (10, 30):
                victims.append(processes.pids[seen[0] % 20 // 10 - 1])
                with suppress(ProcessLookupError):
                    kill(victims[-1])

        readers = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=None, on_batch=kill_some
        )
        counters = service.status()["counters"]
    assert len(victims) == 2
    assert counters["workers_lost"] >= 1
    assert readers.digests_of_packs() == clean.digests_of_packs()
    assert readers.local_packs == len(readers.deliveries)
