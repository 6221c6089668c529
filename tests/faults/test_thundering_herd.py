"""All threads, ranks and nodes want the same shards at the same moment: an origin is read once a
node, and not by all of them in the same instant."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from storage.staging.origins import CountingStore, Origin
from support.demo_config import DATA, demo_config, own_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.scripted_origin import ScriptedOrigin

from dataservice.actors.stager import START_SPREAD_S, open_area
from dataservice.config import config_to_json
from dataservice.storage.staging import StagingArea

JOB = "test"
NODES, THREADS = 16, 4


def test_a_shard_that_all_nodes_want_is_read_once_a_node(tmp_path: Path) -> None:
    need = Origin(tmp_path / "origin").make("a", 1000)
    with nothing_leaks():
        store = CountingStore(lambda _: time.sleep(0.05))
        areas = [
            StagingArea(str(tmp_path / f"node{i}"), budget_bytes=10**6, store=store)
            for i in range(NODES)
        ]
        barrier = threading.Barrier(NODES * THREADS)

        def steps(area: StagingArea) -> None:
            area.update([need])
            barrier.wait(20)
            while area.step():
                pass

        threads = [threading.Thread(target=steps, args=(area,)) for area in areas * THREADS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        copied = [area.figures().copied_shards for area in areas]
        for area in areas:
            area.close()
        store.close()
    assert store.reads == {"a": NODES} and copied == [1] * NODES


def test_stagers_that_start_together_begin_at_moments_of_their_own(tmp_path: Path) -> None:
    config = own_config(demo_config(tmp_path / "base"), tmp_path)
    begins = []
    for _ in range(8):
        before = time.monotonic()
        with open_area(config_to_json(config)) as area:
            begins.append(area.starts_at - before)
    assert len({round(begin, 3) for begin in begins}) > 4
    assert min(begins) >= 0 and max(begins) <= START_SPREAD_S + 0.5


def test_ranks_do_not_multiply_reads_of_an_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks read what the copies of two nodes hold."""
    base = demo_config(tmp_path / "base")
    sizes = {"dp_size": 8, "micro_steps": 1, "steps": 4}
    clean = clean_run(base, **sizes)
    config = own_config(base, tmp_path)
    nodes = ("n0", "n1")
    with nothing_leaks(), monkeypatch.context() as patch:
        origin = ScriptedOrigin(patch, DATA, lambda *_: None)
        with LocalService(config, nodes=nodes, workers=2) as service:
            copied = sum(
                service.stager_when(lambda s: s["copied_shards"] and not s["missing_shards"], node)[
                    "copied_shards"
                ]
                for node in nodes
            )
            staged = dict(origin.calls)
            readers = read_ranks(service.endpoint, job=JOB, **sizes)
            counters = Counter(
                {
                    name: sum(worker[name] for worker in service.status()["workers"])
                    for name in ("read_staged_bytes", "read_origin_bytes")
                }
            )
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s; {copied} copies")
    prove_same(clean, readers.deliveries)
    reads = {name: n for (call, name), n in staged.items() if call == "read"}
    assert reads and max(reads.values()) <= len(nodes), "one range a shard: read once a node"
    assert sum(reads.values()) == copied
    assert counters["read_staged_bytes"] > 0 and counters["read_origin_bytes"] == 0
