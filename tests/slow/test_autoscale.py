"""Workers follow what trainers wait for, up and down, on a real Ray cluster."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import slow_origin
from support.demo_config import demo_settings, write_config
from support.harness import Readers, cluster_service, read_ranks
from support.pictures import encoded, noise

from dataservice.actors.launch import Service
from dataservice.config import Config, load_config
from dataservice.indexing import update_index

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

LATENCY_S = 0.15
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
        self.readers: Readers | None = None
        self.taken = 0
        self._endpoint = endpoint
        self._steps = 100_000
        self._ended = False
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            self.readers = read_ranks(
                self._endpoint,
                job="test",
                dp_size=2,
                micro_steps=2,
                steps=self._steps,
                on_batch=self._took,
                timeout_s=120.0,
            )
        except StopIteration:
            pass

    def _took(self, _: Any) -> None:
        self.taken += 1
        if self._ended:
            raise StopIteration
        time.sleep(self.pause_s)

    def rate(self, seconds: float) -> float:
        """Micro-batches a second of both ranks."""
        before, began = self.taken, time.monotonic()
        time.sleep(seconds)
        return (self.taken - before) / (time.monotonic() - began)

    def __enter__(self) -> Trainers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join(60)
        assert not self._thread.is_alive()


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float) -> float:
    """How long it took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began


def alive(service: Service) -> int:
    return sum(not worker["draining"] for worker in service.status()["workers"])


def test_workers_follow_demand_up_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = behind_a_slow_origin(tmp_path, monkeypatch)
    targets: list[tuple[float, int, str]] = []
    with cluster_service(config, data_nodes=2) as (service, _):
        # two nodes that claim four cores each
        wait_until(lambda: alive(service) == 4, "a worker for every two cores", 60)
        service.scale(1)
        wait_until(lambda: alive(service) == 1, "scaled to one by hand", 60)
        with Trainers(service.endpoint) as trainers:
            wait_until(lambda: trainers.taken > 40, "micro-batches", 60)
            one = trainers.rate(8.0)
            trainers.pause_s = 2 / (2.4 * one)
            began = time.monotonic()
            service.scale(0)
            until = began + 100
            while time.monotonic() < until:
                status = service.status()
                figures = status["scaling"]
                if not targets or targets[-1][1:] != (status["target_workers"], figures["reason"]):
                    targets.append(
                        (time.monotonic() - began, status["target_workers"], figures["reason"])
                    )
                    print(f"{targets[-1][0]:.1f} s: {targets[-1][1]}: {targets[-1][2]} {figures}")
                time.sleep(0.5)
            print(one, trainers.rate(8), 2.4 * one, status["counters"])
