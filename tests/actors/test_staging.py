"""Stagers of a service: which lanes a node stages, and two jobs that share a node's cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService

from dataservice.actors.staging_desk import StagingDesk
from dataservice.core.lanes import lane_nodes


def mapped(hosts: dict[str, str]) -> tuple[str, ...]:
    """Node of each of eight lanes, for stagers of these nodes on these hosts."""
    stagers = {node: SimpleNamespace(hello=SimpleNamespace(host=h)) for node, h in hosts.items()}
    shared: Any = SimpleNamespace(
        registry=SimpleNamespace(stagers=stagers),
        plan=SimpleNamespace(num_lanes=8),
        changes=SimpleNamespace(notify=lambda: None),
        lane_nodes=(),
    )
    StagingDesk(shared).map_lanes()
    found: tuple[str, ...] = shared.lane_nodes
    return found


def test_a_host_has_the_same_lanes_in_a_cluster_started_anew() -> None:
    before = mapped({"id1": "a", "id2": "b", "id3": "c"})
    after = mapped({"id9": "a", "id5": "b", "id7": "c"})
    names = {"id1": "id9", "id2": "id5", "id3": "id7"}
    assert after == tuple(names[node] for node in before)
    assert [("a", "b", "c")[i] for i in lane_nodes(8, ["a", "b", "c"])] == [
        {"id1": "a", "id2": "b", "id3": "c"}[node] for node in before
    ]


def test_nodes_on_one_host_are_told_apart() -> None:
    assert set(mapped({"id1": "a", "id2": "a"})) == {"id1", "id2"}
    assert mapped({}) == ()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_second_job_on_the_node_reads_the_copies_of_the_first(tmp_path: Path) -> None:
    first = demo_config(tmp_path)
    second = dataclasses.replace(first, job="second", state_dir=str(tmp_path / "state2"))
    with LocalService(first) as one:

        def stager(service: LocalService) -> dict[str, Any]:
            found: dict[str, Any] = service.status()["stagers"][0]
            return found

        wait_until(lambda: bool(one.status()["stagers"]))
        wait_until(lambda: stager(one)["copied_shards"] > 0 and not stager(one)["missing_shards"])
        copied = stager(one)
        assert copied["cached_bytes"] == copied["copied_bytes"] > 0
        assert (copied["stalls"], copied["errors"], copied["read_through_shards"]) == (0, 0, 0)
        with LocalService(second) as two:
            readers = read_ranks(two.endpoint, job="second", dp_size=1, micro_steps=2, steps=3)
            assert len(readers.deliveries) == 6
            worker = two.status()["workers"][0]
            assert worker["read_staged_bytes"] > 0 and worker["read_origin_bytes"] == 0
            assert (worker["storage_stalls"], worker["stuck_reads"]) == (0, 0)
            assert stager(two)["cache_dir"] == stager(one)["cache_dir"]
            assert stager(two)["cached_shards"] == copied["cached_shards"]
            assert stager(two)["copied_shards"] == 0
