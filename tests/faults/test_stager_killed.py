"""A node's stager is killed again and again while it copies and while its copies are read."""

from __future__ import annotations

import signal
from pathlib import Path

from support.demo_config import demo_config
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses
from support.until import until

JOB = "test"
SIZES = {"dp_size": 2, "micro_steps": 2, "steps": 12}
KILLS = 3


def divided(service: ServiceProcesses, nodes: tuple[str, ...]) -> dict[str, list[int]]:
    """The lanes of each node's stager; nothing while one has none."""
    lanes = {s["node"]: s["lanes"] for s in service.status()["stagers"]}
    return lanes if lanes.keys() == set(nodes) and all(lanes.values()) else {}


def all_copied(service: ServiceProcesses) -> bool:
    stagers = service.status()["stagers"]
    return all(s["cached_shards"] and not s["missing_shards"] for s in stagers)


def times_joined(log: Path) -> int:
    return log.read_text().count("stager joined on n0")


def copying(service: ServiceProcesses, log: Path, joined: int) -> bool:
    """Whether the stager of n0 has joined so many times and has shards to copy."""
    stagers = {s["node"]: s for s in service.status()["stagers"]}
    return times_joined(log) == joined and bool(stagers["n0"]["missing_shards"])


def test_a_stager_killed_again_and_again(tmp_path: Path) -> None:
    """It is started anew within its lease: its lanes stay, its copies are used again."""
    config = demo_config(
        tmp_path,
        staging={"max_bytes_per_s": "150 kB"},  # so that it is killed in mid-copy
        serving={"port": 0, "lease_s": 4.0, "plan_ahead_steps": 6},
    )
    clean = clean_run(config, **SIZES)
    nodes, log = ("n0", "n1"), tmp_path / "service" / "coordinator.log"
    with nothing_leaks():
        with (
            ServiceProcesses(config, tmp_path / "service", nodes=nodes) as service,
            RankProcesses(
                service.endpoint, tmp_path / "ranks", job=JOB, **SIZES, pause_s=0.4
            ) as ranks,
        ):
            before = until("both have lanes", lambda: divided(service, nodes))
            ranks.wait_for_step(1)
            until("a first copy in the making", lambda: copying(service, log, joined=1))
            service.signal("stager-n0", signal.SIGKILL)
            until("another in the making", lambda: copying(service, log, joined=2))
            service.signal("stager-n0", signal.SIGKILL)
            until("it to join", lambda: times_joined(log) == KILLS)
            service.signal("stager-n0", signal.SIGKILL)
            assert ranks.wait(90) == {0: 0, 1: 0}
            until("both copied all", lambda: all_copied(service))
            status = service.status()
    print(f"recovered in {longest_gap(ranks.deliveries()):.1f} s")
    prove_same(clean, ranks.deliveries())
    assert service.exits == [("stager-n0", -signal.SIGKILL)] * KILLS
    assert {s["node"]: s["lanes"] for s in status["stagers"]} == before
    assert status["counters"]["lanes_moved"] == len(before["n1"])  # as it joined
    assert status["counters"].get("stagers_lost", 0) == 0
    for node in nodes:
        assert not list((tmp_path / "cache" / node).glob(".tmp-*"))
