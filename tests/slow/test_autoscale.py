"""Workers follow what trainers wait for, up and down, on a real Ray cluster, and Ray's own
autoscaler adds the nodes that they need."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import slow_origin
from support.demo_config import demo_settings, write_config
from support.growing_cluster import growing_cluster
from support.harness import Delivery, cluster_service, delivery_of
from support.pictures import encoded, noise
from support.proof import clean_run, prove_same

from dataservice.actors.launch import Service, running_service
from dataservice.config import Config, load_config
from dataservice.indexing import update_index
from trainer_client import PackStream, ParallelLayout

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

MICRO_STEPS = 2
LATENCY_S = 0.5
"""Of a read from the origin: what a worker builds in a second is bounded by it, not by the cores of
the machine, which all workers share."""


def behind_a_slow_origin(folder: Path, monkeypatch: pytest.MonkeyPatch, **workers: Any) -> Config:
    """A config over pictures that take LATENCY_S to read, in this and all later processes."""
    data = folder / "data"
    data.mkdir(parents=True)
    lines = []
    with zipfile.ZipFile(data / "slow.zip", "w") as archive:
        for number in range(48):
            archive.writestr(
                f"{number}.jpg", encoded(Image.fromarray(noise(56, 56, seed=number)), "JPEG")
            )
            turns = [
                {"from": "human", "value": "<image>\nWhat is it?"},
                {"from": "gpt", "value": f"Noise number {number}."},
            ]
            lines.append(json.dumps({"image": f"{number}.jpg", "conversations": turns}) + "\n")
    (data / "slow.jsonl").write_text("".join(lines))
    for name, value in slow_origin.install(folder / "fs", latency_s=0.0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(folder / "fs"))
    slow_origin.activate_here(folder / "fs")
    settings = demo_settings(
        folder,
        plan={"pack_length": 256, "epochs": "endless", "lanes": 2, "window": 12},
        workers={
            "count": "auto",
            "decode_threads": 1,
            "max": 6,
            "num_cpus": 0.5,
            "ready_bytes": "16 MiB",
            **workers,
        },
    )
    settings["staging"] = {"cache_dir": None}
    source = {"name": "slow", "records": f"slow://{data}/slow.jsonl", "weight": 1}
    settings["sources"] = [source | {"images": f"slow://{data}/slow.zip"}]
    config = load_config(str(write_config(folder, settings)))
    update_index(config)
    monkeypatch.setenv("SLOW_ORIGIN_S", str(LATENCY_S))
    return config


class Trainers:
    """Two ranks that take a micro-batch every `pause_s` seconds, until they are stopped."""

    def __init__(self, endpoint: str) -> None:
        self.pause_s = 0.0
        self.deliveries: list[Delivery] = []
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read, args=(rank,)) for rank in range(2)]

    def _read(self, rank: int) -> None:
        try:
            with PackStream(
                self._endpoint,
                job="test",
                layout=ParallelLayout.data_parallel(rank, 2),
                micro_steps=MICRO_STEPS,
                run_id="run",
                timeout_s=60.0,
                digests=True,
            ) as stream:
                while not self._stopping.is_set():
                    self.deliveries.append(delivery_of(next(stream), rank))
                    self._stopping.wait(self.pause_s)
        except BaseException as error:
            self._errors.append(error)

    def rate(self, seconds: float) -> float:
        """Micro-batches a second of both ranks."""
        before, began = len(self.deliveries), time.monotonic()
        time.sleep(seconds)
        return (len(self.deliveries) - before) / (time.monotonic() - began)

    def whole_steps(self) -> int:
        return min(max(d.step for d in self.deliveries if d.dp_rank == rank) for rank in range(2))

    def __enter__(self) -> Trainers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(90)
        if self._errors:
            raise self._errors[0]


def wait_until(
    is_so: Callable[[], bool], what: str, timeout_s: float, service: Service | None = None
) -> float:
    """How long it took."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > timeout_s:
            scaling = service.status()["scaling"] if service is not None else ""
            pytest.fail(f"not within {timeout_s:g} s: {what}; {scaling}")
        time.sleep(0.2)
    return time.monotonic() - began


def alive(service: Service) -> int:
    return sum(not worker["draining"] for worker in service.status()["workers"])


def test_workers_follow_demand_up_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = behind_a_slow_origin(tmp_path, monkeypatch)
    with cluster_service(config, data_nodes=2) as (service, _):
        wait_until(lambda: alive(service) == 4, "one for every two cores that the nodes claim", 60)
        service.scale(1)
        wait_until(lambda: len(service.status()["workers"]) == 1, "one, set by hand", 60)
        with Trainers(service.endpoint) as trainers:
            wait_until(lambda: len(trainers.deliveries) > 20, "micro-batches", 60)
            of_one = trainers.rate(8.0)
            trainers.pause_s = 2 / (2.2 * of_one)
            service.scale(0)
            up_s = wait_until(lambda: alive(service) >= 3, "three workers", 120, service)
            time.sleep(20.0)
            status = service.status()
            assert 3 <= status["target_workers"] <= 4
            before, began = status["session"]["waited_s"], time.monotonic()
            time.sleep(10.0)
            waited = np.subtract(service.status()["session"]["waited_s"], before)
            share = float(waited.max()) / (time.monotonic() - began)

            trainers.pause_s = 2 / (0.5 * of_one)
            down_s = wait_until(lambda: alive(service) <= 2, "fewer workers", 180, service)
        counters = service.status()["counters"]
        steps = trainers.whole_steps()
    print(
        f"\none worker builds {of_one:.1f} packs/s; three or more {up_s:.0f} s after trainers "
        f"wanted {2.2 * of_one:.1f}, which then waited {share:.1%} of their time; two or fewer "
        f"{down_s:.0f} s after they wanted {0.5 * of_one:.1f}"
    )
    assert counters["workers_scaled"] >= 4 and counters["packs_shared"] > 0
    assert counters.get("workers_lost", 0) == 0
    assert share < 0.2  # a machine that others use as well
    monkeypatch.setenv("SLOW_ORIGIN_S", "0")
    clean = clean_run(config, dp_size=2, micro_steps=MICRO_STEPS, steps=steps)
    prove_same(clean, [d for d in trainers.deliveries if d.step < steps])


def shared(service: Service) -> int:
    count: int = service.status()["counters"].get("packs_shared", 0)
    return count


def living_data_nodes() -> int:
    import ray

    return sum(node["Alive"] and "data_node" in node["Resources"] for node in ray.nodes())


def test_rays_autoscaler_adds_the_nodes_that_workers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = {"autoscale": "nodes", "num_cpus": 1.0, "max": 3}
    config = behind_a_slow_origin(tmp_path, monkeypatch, **workers)
    node = {"CPU": 1, "data_node": 1}
    with (
        tempfile.TemporaryDirectory(prefix="grow-", ignore_cleanup_errors=True) as folder,
        growing_cluster(Path(folder), node=node, most=3) as address,
        running_service(config, address=address) as service,
    ):
        first_s = wait_until(lambda: alive(service) == 1, "a node and its worker", 90, service)
        with Trainers(service.endpoint) as trainers:
            wait_until(lambda: len(trainers.deliveries) > 4, "micro-batches", 60)
            second_s = wait_until(lambda: alive(service) >= 2, "another of each", 120, service)
            wait_until(lambda: shared(service) > 0, "packs moved", 30)
            nodes = [worker["node"] for worker in service.status()["workers"]]
            assert len(nodes) == len(set(nodes)) >= 2
            service.scale(1)
            idle_s = wait_until(lambda: living_data_nodes() == 1, "idle nodes removed", 90)
            read = len(trainers.deliveries)
            wait_until(lambda: len(trainers.deliveries) > read + 8, "more micro-batches", 30)
        steps = trainers.whole_steps()
    print(
        f"\nfrom no data node to the first worker {first_s:.0f} s, with a second node "
        f"{second_s:.0f} s after trainers began to wait; back to one node {idle_s:.0f} s after "
        "one worker was asked for"
    )
    monkeypatch.setenv("SLOW_ORIGIN_S", "0")
    clean = clean_run(config, dp_size=2, micro_steps=MICRO_STEPS, steps=steps)
    prove_same(clean, [d for d in trainers.deliveries if d.step < steps])
