"""Data nodes and workers join and leave while ranks read; the run goes on at other sizes: the same
packs in the same order, and no more is copied anew than what changed its node."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config, demo_settings, own_config, write_config
from support.harness import Readers, read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same

from dataservice.actors.member import PULL_WAIT_S
from dataservice.config import Config, load_config
from dataservice.indexing import update_index

JOB = "test"
LEASE_S = 0.6
FILES = 36


# ---- what moves ----------------------------------------------------------------------------------


@pytest.fixture
def many_files(tmp_path: Path) -> Config:
    """Twelve lanes of three text files or so; a window of a lane reads a good part of them."""
    folder = tmp_path / "data"
    folder.mkdir()
    words = random.Random(0)
    for number in range(FILES):
        lines = [
            json.dumps({"text": " ".join(words.choices(["alpha", "beta", "gamma"], k=40))})
            for _ in range(20)
        ]
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    settings = demo_settings(
        tmp_path,
        plan={"pack_length": 512, "lanes": 12, "window": 10, "epochs": "endless"},
        serving={"port": 0, "lease_s": LEASE_S, "plan_ahead_steps": 6},
    )
    settings["sources"] = [{"name": "text", "records": f"{folder}/*.jsonl", "weight": 1}]
    config = load_config(str(write_config(tmp_path, settings)))
    update_index(config)
    return config


def copies(config: Config, node: str) -> dict[str, int]:
    """Name of the copy -> bytes."""
    assert config.staging.cache_dir is not None
    folder = Path(config.staging.cache_dir) / node
    return {path.name: path.stat().st_size for path in folder.glob("[!.]*")}


def wait_until_staged(service: LocalService, *nodes: str) -> dict[str, dict[str, Any]]:
    """Their stagers' figures, once the lanes are divided among them, every copy is there, and a
    stager's next word says the same."""
    until = time.monotonic() + 30.0
    before: dict[str, dict[str, Any]] = {}
    while True:
        found = {s["node"]: s for s in service.status()["stagers"]}
        whole = all(
            s["lanes"] and s["copied_shards"] and not s["missing_shards"] for s in found.values()
        )
        if whole and found.keys() == set(nodes) and _copied(found) == _copied(before):
            return found
        assert time.monotonic() < until, found
        before = found
        time.sleep(1.2 * PULL_WAIT_S)


def _copied(figures: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {node: s["copied_shards"] for node, s in figures.items()}


@pytest.mark.slow
def test_a_node_that_joins_or_leaves_costs_the_copies_of_its_own_lanes(many_files: Config) -> None:
    config = many_files
    with nothing_leaks(), LocalService(config, workers=0, nodes=("n0", "n1", "n2")) as service:
        before = wait_until_staged(service, "n0", "n1", "n2")
        assert [len(before[node]["lanes"]) for node in before] == [4, 4, 4]
        moved = service.status()["counters"]["lanes_moved"]  # as they came one by one
        time.sleep(6 * LEASE_S)  # the nodes have been the same for a stager's lease
        service.add_stager("n3")
        joined = wait_until_staged(service, "n0", "n1", "n2", "n3")
        assert len(joined["n3"]["lanes"]) == 3
        for node in before:
            assert set(joined[node]["lanes"]) < set(before[node]["lanes"])
            assert joined[node]["copied_bytes"] == before[node]["copied_bytes"]
        assert joined["n3"]["copied_bytes"] == sum(copies(config, "n3").values())
        assert service.status()["counters"]["lanes_moved"] == moved + 3
        size = joined["n3"]["copied_bytes"]
        print(f"\na fourth node joins: 3 of 12 lanes move, {size:,} bytes are copied, the least")

        time.sleep(6 * LEASE_S)
        held = {node: copies(config, node) for node in joined}
        service.remove_stager("n0")
        began = time.monotonic()
        service.stager_when(lambda s: len(s["lanes"]) == 4, "n1")
        print(f"recovered in {time.monotonic() - began:.1f} s")
        left = wait_until_staged(service, "n1", "n2", "n3")
        counters = service.status()["counters"]
        assert counters["lanes_moved"] == moved + 6 and counters["stagers_lost"] == 1
        for node in left:
            assert set(joined[node]["lanes"]) < set(left[node]["lanes"])
            copied = left[node]["copied_bytes"] - joined[node]["copied_bytes"]
            new = copies(config, node).keys() - held[node].keys()
            assert copied == sum(copies(config, node)[name] for name in new)
            assert new <= held["n0"].keys(), "nothing but what the node had that left"


# ---- while ranks read ----------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    base = demo_config(
        tmp_path / "base", serving={"port": 0, "lease_s": LEASE_S, "plan_ahead_steps": 6}
    )
    return own_config(base, tmp_path)


def test_nodes_and_workers_join_and_leave_while_ranks_read(config: Config) -> None:
    sizes: dict[str, Any] = {"dp_size": 2, "micro_steps": 4, "steps": 16}
    clean = clean_run(config, **sizes)
    seen, lock = [0], threading.Lock()
    with nothing_leaks(), LocalService(config, workers=2, nodes=("n0", "n1")) as service:

        def changes() -> Iterator[None]:
            service.add_stager("n2")
            service.add_worker("n2")
            yield
            service.remove_stager("n0")
            service.cut_worker(next(w for w in service.workers if w.endswith("n0")))
            yield
            service.cut_worker(next(w for w in service.workers if w.endswith("n2")))
            yield
            service.add_worker("n0")
            service.add_stager("n0")
            yield

        script = changes()

        def change(_: Any) -> None:
            with lock:
                seen[0] += 1
                if seen[0] % 24 == 8:
                    next(script, None)

        readers = read_ranks(service.endpoint, job=JOB, **sizes, on_batch=change, pause_s=0.05)
        status = service.status()
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")
    prove_same(clean, readers.deliveries)
    assert status["counters"]["workers_lost"] == 2
    assert status["counters"]["lanes_moved"] > 0
    assert sorted(lane for s in status["stagers"] for lane in s["lanes"]) == [0, 1, 2, 3]


def order(readers: Readers) -> dict[int, tuple[str, str]]:
    """Global pack number -> (pack, digest)."""
    return {
        number: (pack_id, digest)
        for d in readers.deliveries
        for number, pack_id, digest in zip(d.numbers, d.pack_ids, d.digests, strict=True)
    }


def test_the_run_goes_on_at_other_sizes_on_other_nodes_in_the_same_order(
    config: Config, tmp_path: Path
) -> None:
    """Each leg is a service of its own, as after a stop of everything, on other nodes."""
    legs = [
        (("n0", "n1"), 2, 4, 3),
        (("n0", "n1", "n2"), 4, 2, 3),
        (("n2",), 3, 2, 3),
        (("n1", "n3"), 1, 5, 3),
    ]
    clean = order(clean_run(config, dp_size=2, micro_steps=4, steps=12))
    state: dict[str, Any] | None = None
    got: dict[int, tuple[str, str]] = {}
    with nothing_leaks():
        for number, (nodes, dp_size, micro_steps, steps) in enumerate(legs):
            own = dataclasses.replace(config, state_dir=str(tmp_path / f"state{number}"))
            with LocalService(own, workers=len(nodes), nodes=nodes) as service:
                readers = read_ranks(
                    service.endpoint,
                    job=JOB,
                    dp_size=dp_size,
                    micro_steps=micro_steps,
                    steps=steps,
                    states=None if state is None else dict.fromkeys(range(dp_size), state),
                )
                assert service.status()["session"]["dp_size"] == dp_size
            state = readers.states[0]
            assert not got.keys() & order(readers).keys()
            got |= order(readers)
    assert sorted(got) == list(range(24 + 24 + 18 + 15))
    assert got == {number: clean[number] for number in got}
