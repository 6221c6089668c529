"""A node's stager is killed again and again while it copies and while its copies are read."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from support.demo_config import demo_config
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses

JOB = "test"
SIZES = {"dp_size": 2, "micro_steps": 2, "steps": 12}
KILLS = 3


def test_a_stager_killed_again_and_again(tmp_path: Path) -> None:
    """It is started anew within its lease: its lanes stay, its copies are used again."""
    config = demo_config(
        tmp_path,
        staging={"max_bytes_per_s": "1 MB"},  # so that it is killed in mid-copy
        serving={"port": 0, "lease_s": 4.0, "plan_ahead_steps": 6},
    )
    clean = clean_run(config, **SIZES)
    nodes = ("n0", "n1")
    with nothing_leaks():
        with (
            ServiceProcesses(config, tmp_path / "service", nodes=nodes) as service,
            RankProcesses(
                service.endpoint, tmp_path / "ranks", job=JOB, **SIZES, pause_s=0.1
            ) as ranks,
        ):
            before = {s["node"]: s["lanes"] for s in service.status()["stagers"]}
            for number in range(KILLS):
                ranks.wait_for_step(3 * number + 1)
                service.signal("stager-n0", signal.SIGKILL)
            assert ranks.wait(90) == {0: 0, 1: 0}
            status = service.status()
            until = time.monotonic() + 60.0
            while any(s["missing_shards"] or not s["copied_shards"] for s in status["stagers"]):
                assert time.monotonic() < until, status["stagers"]
                time.sleep(0.1)
                status = service.status()
    print(f"recovered in {longest_gap(ranks.deliveries()):.1f} s")
    prove_same(clean, ranks.deliveries())
    assert service.exits == [("stager-n0", -signal.SIGKILL)] * KILLS
    assert {s["node"]: s["lanes"] for s in status["stagers"]} == before
    assert status["counters"]["lanes_moved"] == len(before["n1"])  # as it joined
    assert status["counters"].get("stagers_lost", 0) == 0
    for node in nodes:
        assert not list((tmp_path / "cache" / node).glob(".tmp-*"))
