"""Worker actors on Ray while ranks read: one is killed with SIGKILL, one gets SIGTERM, one is
stopped for good; each is replaced, and the ranks get what they would have."""

from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_config import demo_config
from support.harness import RESOURCE, cluster_service, listener, read_ranks
from support.proof import clean_run, longest_gap, prove_same
from support.until import until, workers_of

from dataservice.actors.launch import Service

STEPS = 110
BOUND_S = 60.0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_is_replaced(tmp_path: Path) -> None:
    config = demo_config(tmp_path, workers={"count": 2, "resource": RESOURCE, "decode_threads": 1})
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    config = dataclasses.replace(config, state_dir=str(tmp_path / "state"))
    seen, ends, pids = [0], {40: signal.SIGKILL, 160: signal.SIGTERM, 280: signal.SIGSTOP}, []
    lock = threading.Lock()
    with cluster_service(config, data_nodes=1) as (service, _):
        until("two workers", lambda: len(workers_of(service)) == 2)

        def end_one(_: Any) -> None:
            with lock:
                seen[0] += 1
                if seen[0] in ends:
                    until("two workers", lambda: len(workers_of(service)) == 2)
                    pids.append(newest(service))
                    psutil.Process(pids[-1]).send_signal(ends[seen[0]])

        readers = read_ranks(
            service.endpoint,
            job="test",
            dp_size=2,
            micro_steps=2,
            steps=STEPS,
            on_batch=end_one,
            pause_s=0.02,
        )
        counters = service.status()["counters"]
        until("all of them have ended", lambda: not any(map(is_running, pids)))
        until("two workers", lambda: len(workers_of(service)) == 2)
    prove_same(clean, readers.deliveries)
    assert len(pids) == 3
    assert counters["workers_lost"] == 2
    assert counters["workers_retired"] == 1
    recovered_s = longest_gap(readers.deliveries)
    print(f"recovered in {recovered_s:.1f} s")
    assert recovered_s < BOUND_S


def newest(service: Service) -> int:
    """Process of the worker that came last."""
    processes = [psutil.Process(listener(w["endpoint"])) for w in workers_of(service)]
    return max(processes, key=lambda process: process.create_time()).pid


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
