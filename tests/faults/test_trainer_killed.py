"""All ranks of a trainer killed and started again from their last checkpoint: the same packs, and
the service gives back what it held for those that are gone."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_config import demo_config
from support.proof import clean_run, nothing_leaks, prove_same
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses
from support.until import until

JOB, DP, MICRO, STEPS = "test", 2, 2, 10
SOON_S = 10.0


def connections_from(service: ServiceProcesses, pids: list[int]) -> int:
    """Connections of workers and coordinator to processes that are, or were, `pids`."""
    ours = {
        (connection.raddr.ip, connection.raddr.port)
        for pid in service.pids.values()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    }
    members = {
        (connection.laddr.ip, connection.laddr.port)
        for pid in service.pids.values()
        for connection in psutil.Process(pid).net_connections("tcp")
    }
    return len(ours - members)


def ready(status: dict[str, Any]) -> tuple[int, int]:
    workers = status["workers"]
    return (
        sum(worker["ready_packs"] for worker in workers),
        sum(worker["queued_packs"] for worker in workers),
    )


@pytest.mark.slow
def test_all_ranks_killed_and_started_from_a_checkpoint(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    clean = clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)
    settings: dict[str, Any] = {"job": JOB, "dp_size": DP, "micro_steps": MICRO, "local": False}
    with nothing_leaks(), ServiceProcesses(config, tmp_path / "service") as service:
        with RankProcesses(
            service.endpoint,
            tmp_path / "first",
            steps=STEPS,
            save_every=2,
            pause_s=0.1,
            **settings,
        ) as first:
            first.wait_for_step(5)
            pids = list(first.pids.values())
            assert connections_from(service, pids) > 0
            for rank in range(DP):
                first.signal(rank, signal.SIGKILL)
            assert first.wait(SOON_S) == dict.fromkeys(range(DP), -signal.SIGKILL)
        died = time.monotonic()
        gone = "connections of dead ranks are given back"
        until(gone, lambda: connections_from(service, pids) == 0, SOON_S)
        print(f"{gone} in {time.monotonic() - died:.1f} s")
        states = first.last_state()
        assert states is not None
        resumed_at = int(states.name.removeprefix("step-"))
        killed = time.monotonic()
        with RankProcesses(
            service.endpoint,
            tmp_path / "second",
            steps=None,
            states=states,
            **settings,
        ) as second:
            assert second.wait(60) == dict.fromkeys(range(DP), 0)
        ends = second.deliveries()
        print(f"recovered in {min(d.at for d in ends) - killed:.1f} s")
        until("no pack of an ended run is kept", lambda: ready(service.status()) == (0, 0), SOON_S)
        status = service.status()
    kept = [d for d in first.deliveries() if d.step < resumed_at]
    prove_same(clean, [*kept, *(d for d in ends if d.step < STEPS)])
    assert status["session"]["closed"] == [True] * DP
    assert status["counters"]["sessions"] == 2
