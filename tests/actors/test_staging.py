"""Stagers of a service: which lanes a node stages, and two jobs that share a node's cache."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService

from dataservice.actors.registry import Registry
from dataservice.actors.staging_desk import StagingDesk
from dataservice.actors.state_log import StateLog
from dataservice.core.lanes import lane_nodes
from dataservice.wire.staging import RegisterStager

LANES = 8
LEASE_S = 10.0


class Desk:
    """A coordinator's staging desk with its stagers, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holders: tuple[str, ...] = ()) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.log = SimpleNamespace(lane_holders=holders, lanes=self._journalled)
        self.shared: Any = SimpleNamespace(
            registry=Registry(lease_s=LEASE_S / 5, stager_lease_s=LEASE_S),
            plan=SimpleNamespace(num_lanes=LANES),
            changes=SimpleNamespace(notify=lambda: None),
            counters=Counter(),
            log=self.log,
            lane_nodes=(),
            drained_nodes=set(),
            on_scale=lambda: None,
        )
        self.desk = StagingDesk(self.shared)

    def _journalled(self, holders: tuple[str, ...]) -> None:
        self.log.lane_holders = holders

    def join(self, node: str, host: str) -> None:
        hello = RegisterStager(node=node, host=host, cache_dir="/cache", budget_bytes=1)
        asyncio.run(self.desk.register_stager(hello))

    def later(self, seconds: float, *, silent: str = "") -> None:
        """Time passes, and all stagers but one are heard."""
        for _ in range(math.ceil(seconds)):
            self.now += 1.0
            for node, seat in self.shared.registry.stagers.items():
                seat.heard = seat.heard if node == silent else self.now
            self.desk.expire()

    @property
    def lanes(self) -> tuple[str, ...]:
        """The node of each."""
        return self.shared.lane_nodes

    def moved_since(self, before: tuple[str, ...]) -> int:
        return sum(a != b for a, b in zip(before, self.lanes, strict=True))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_a_host_has_the_same_lanes_in_a_cluster_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for nodes in ({"id1": "a", "id2": "b", "id3": "c"}, {"id9": "c", "id5": "a", "id7": "b"}):
        desk = Desk(monkeypatch)
        for node, host in nodes.items():
            desk.join(node, host)
        found.append([nodes[node] for node in desk.lanes])
    assert found[0] == found[1] == [("a", "b", "c")[i] for i in lane_nodes(LANES, ["a", "b", "c"])]


def test_nodes_on_one_host_are_told_apart(desk: Desk) -> None:
    desk.join("id1", "a")
    desk.join("id2", "a")
    assert Counter(desk.lanes) == {"id1": 4, "id2": 4}


def test_a_node_that_joins_or_leaves_moves_no_lane_of_others(desk: Desk) -> None:
    for node in "abc":
        desk.join(node, node)
    desk.later(LEASE_S + 1)
    before = desk.lanes
    desk.join("d", "d")
    assert desk.moved_since(before) == desk.lanes.count("d") == 2
    desk.later(LEASE_S + 1)
    before = desk.lanes
    desk.later(LEASE_S + 1, silent="b")
    assert desk.moved_since(before) == before.count("b") and "b" not in desk.lanes
    assert desk.shared.counters == {"stagers_lost": 1, "lanes_moved": ANY}


def test_a_node_that_comes_back_soon_has_its_lanes_again(desk: Desk) -> None:
    for node in "abc":
        desk.join(node, node)
    desk.later(LEASE_S + 1)
    before = desk.lanes
    desk.later(LEASE_S + 1, silent="b")
    assert desk.lanes != before
    desk.join("b", "b")
    assert desk.lanes == before


def test_a_coordinator_that_restarts_waits_for_the_nodes_that_held_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders = tuple("aabbccbc")
    desk = Desk(monkeypatch, holders)
    desk.join("id-a", "a")
    assert desk.lanes == ("id-a", "id-a", "", "", "", "", "", "")
    desk.join("id-c", "c")
    assert desk.lanes.count("id-c") == 3
    desk.later(LEASE_S - 1)
    assert desk.lanes.count("") == 3
    desk.later(2)
    assert Counter(desk.lanes) == {"id-a": 4, "id-c": 4}
    desk.join("id-b", "b")
    assert "".join(node[3:] for node in desk.lanes) == "".join(holders)


def test_a_drained_node_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, tuple("aabbccbc"))
    desk.join("id-a", "a")
    desk.join("id-c", "c")
    desk.join("id-b", "b")
    desk.shared.drained_nodes.add("id-b")
    desk.desk.map_lanes()
    assert Counter(desk.lanes) == {"id-a": 4, "id-c": 4}
    desk.shared.drained_nodes.clear()
    desk.desk.map_lanes()
    assert Counter(desk.lanes) == {"id-a": 2, "id-b": 3, "id-c": 3}


def test_of_two_nodes_on_one_host_one_drains(desk: Desk) -> None:
    desk.join("id1", "a")
    desk.join("id2", "a")
    desk.join("id3", "b")
    desk.later(LEASE_S + 1)
    before = desk.lanes
    desk.shared.drained_nodes.add("id2")
    desk.desk.map_lanes()
    assert desk.moved_since(before) == before.count("id2")


def test_lanes_that_moved_for_long_are_journalled(tmp_path: Path) -> None:
    log = StateLog(str(tmp_path / "journal"))
    log.start_epoch("plan", "a")
    log.lanes(("a", "b"))
    log.close()
    again = StateLog(str(tmp_path / "journal"))
    assert again.lane_holders == ("a", "b")
    again.start_epoch("plan", "a")
    again.close()
    again = StateLog(str(tmp_path / "journal"))
    assert again.lane_holders == ("a", "b")
    again.start_epoch("another plan, whose lanes hold other data", "a")
    assert again.lane_holders == ()
    again.close()


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
