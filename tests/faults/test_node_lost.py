"""Data nodes of a Ray cluster are taken away without grace, and join, while ranks read: lanes of a
node that is gone move and the others stay, and the packs are the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from support.demo_config import demo_config
from support.harness import RESOURCE, Readers, cluster_service, read_ranks
from support.proof import clean_run, longest_gap, prove_same

from dataservice.actors.launch import Service
from dataservice.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

SIZES: dict[str, Any] = {"dp_size": 2, "micro_steps": 4, "steps": 16}
NODES, WORKERS = 3, 3


@dataclass
class Run:
    config: Config
    service: Service
    cluster: Any
    clean: Readers

    def lanes(self) -> dict[str, set[int]]:
        return {s["node"]: set(s["lanes"]) for s in self.service.status()["stagers"]}

    def workers(self) -> list[str]:
        """The node of each that takes packs."""
        return [w["node"] for w in self.service.status()["workers"] if not w["draining"]]

    def read(self, on_batch: Callable[[Any], None] | None = None, **sizes: Any) -> Readers:
        given = {**SIZES, "pause_s": 0.05, "on_batch": on_batch, **sizes}
        return read_ranks(self.service.endpoint, job="test", **given)

    def lose_a_node(self) -> None:
        node = self.cluster.list_all_nodes()[-1]
        self.cluster.remove_node(node, allow_graceful=False)

    def add_a_node(self) -> None:
        self.cluster.add_node(num_cpus=4, resources={RESOURCE: 1}, wait=False)

    def wait_for(self, nodes: int, timeout_s: float = 90.0) -> float:
        """Until the lanes are divided among so many nodes, each with a worker; seconds."""
        began = time.monotonic()
        while True:
            lanes, workers = self.lanes(), self.workers()
            even = len(lanes) == nodes and all(lanes.values())
            if even and len(workers) == WORKERS and set(workers) == set(lanes):
                return time.monotonic() - began
            assert time.monotonic() - began < timeout_s, (lanes, workers)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = demo_config(
        tmp_path_factory.mktemp("run"), workers={"count": WORKERS, "decode_threads": 1}
    )
    clean = clean_run(config, **SIZES)
    before = set(psutil.Process().children(recursive=True))
    with cluster_service(config, data_nodes=NODES) as (service, cluster):
        yield Run(config, service, cluster, clean)
    left = set(psutil.Process().children(recursive=True)) - before
    psutil.wait_procs(left, 10)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


class Reading:
    """Ranks that read in threads of their own; Ray takes and adds nodes in the main one."""

    def __init__(self, run: Run) -> None:
        self.taken = 0
        self._found: list[Readers] = []
        self._thread = threading.Thread(
            target=lambda: self._found.append(run.read(self._took, pause_s=0.15))
        )
        self._thread.start()

    def _took(self, _: Any) -> None:
        self.taken += 1

    def wait_for(self, batches: int) -> None:
        until = time.monotonic() + 60.0
        while self.taken < batches:
            assert time.monotonic() < until and self._thread.is_alive(), self.taken
            time.sleep(0.02)

    def result(self) -> Readers:
        self._thread.join(120)
        (readers,) = self._found
        return readers


def test_a_node_lost_while_ranks_read(run: Run) -> None:
    run.wait_for(NODES)
    before, counters = run.lanes(), run.service.status()["counters"]
    reading = Reading(run)
    reading.wait_for(20)
    run.lose_a_node()
    readers = reading.result()
    took = run.wait_for(NODES - 1)
    after = run.lanes()
    print(f"\nrecovered in {longest_gap(readers.deliveries):.1f} s (longest gap of a rank)")
    print(f"lanes moved and workers replaced {took:.1f} s after the ranks had read all")
    prove_same(run.clean, readers.deliveries)
    assert all(before[node] < lanes or before[node] == lanes for node, lanes in after.items())
    assert sorted(lane for lanes in after.values() for lane in lanes) == [0, 1, 2, 3]
    now = run.service.status()["counters"]
    assert now["stagers_lost"] == counters.get("stagers_lost", 0) + 1
    assert now["workers_lost"] > counters.get("workers_lost", 0)


def test_a_node_that_joins_while_ranks_read_gets_lanes_and_a_worker(run: Run) -> None:
    nodes = len(run.lanes())
    run.wait_for(nodes)
    before = run.lanes()
    reading = Reading(run)
    reading.wait_for(10)
    run.add_a_node()
    readers = reading.result()
    took = run.wait_for(nodes + 1)
    print(f"\nit serves {took:.1f} s after the ranks had read all")
    prove_same(run.clean, readers.deliveries)
    after = run.lanes()
    (new,) = after.keys() - before.keys()
    assert after[new] and all(after[node] <= before[node] for node in before)


def test_the_run_goes_on_at_other_sizes_after_another_node_is_lost(run: Run) -> None:
    nodes = len(run.lanes())
    run.wait_for(nodes)
    clean = order(run.clean)
    first = run.read(steps=4)
    state = first.states[0]
    run.lose_a_node()
    began = time.monotonic()
    second = run.read(
        dp_size=4, micro_steps=2, steps=4, states=dict.fromkeys(range(4), state), pause_s=0.0
    )
    print(f"\nrecovered in {time.monotonic() - began:.1f} s, four steps of four ranks read")
    run.add_a_node()
    third = run.read(
        dp_size=3, micro_steps=3, steps=4, states=dict.fromkeys(range(3), second.states[0])
    )
    run.wait_for(nodes)
    got = order(first) | order(second) | order(third)
    assert sorted(got) == list(range(4 * 8 + 4 * 8 + 4 * 9))
    assert got == {number: clean[number] for number in got}


def order(readers: Readers) -> dict[int, tuple[str, str]]:
    """Global pack number -> (pack, digest)."""
    return {
        number: (pack_id, digest)
        for d in readers.deliveries
        for number, pack_id, digest in zip(d.numbers, d.pack_ids, d.digests, strict=True)
    }
