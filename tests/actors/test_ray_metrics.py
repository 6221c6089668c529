"""What Ray's own metrics are told."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from dataservice.actors import ray_metrics
from dataservice.actors.ray_actors import StagerActor, WorkerActor
from dataservice.actors.ray_metrics import MIRRORED, RayMirror, keep_mirrored
from dataservice.obs.metrics import METRICS, Sheet


class FakeMetric:
    made: dict[str, FakeMetric]

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description == METRICS[name].text
        self.tag_keys = tag_keys
        self.told: list[tuple[float, dict[str, str]]] = []
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.told.append((value, tags))


class FakeCounter(FakeMetric):
    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self.set(value, tags)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeMetric]:
    FakeMetric.made = {}
    monkeypatch.setattr(ray_metrics, "Gauge", type("Gauge", (FakeMetric,), {}))
    monkeypatch.setattr(ray_metrics, "Counter", FakeCounter)
    return FakeMetric.made


def sheet(packs: int, ready: int) -> Sheet:
    found = Sheet("worker", job="vlm")
    found.put("packs_total", packs)
    found.put("ready_bytes", ready)
    found.put("decode_threads", 4)
    return found


def test_counters_are_told_what_came_since_the_last_time(made: dict[str, FakeMetric]) -> None:
    mirror = RayMirror()
    for packs, ready in ((3, 10), (3, 20), (8, 5)):
        mirror.show(sheet(packs, ready))
    job = {"job": "vlm"}
    assert made["dataservice_packs_total"].told == [(3, job), (5, job)]
    assert made["dataservice_ready_bytes"].told == [(10, job), (20, job), (5, job)]
    assert "dataservice_decode_threads" not in made, "a few are enough"


def test_series_of_one_counter_are_told_apart(made: dict[str, FakeMetric]) -> None:
    found = Sheet("coordinator", job="vlm")
    for role, count in (("worker", 2), ("planner", 1)):
        found.put("worker_restarts_total", count, role=role, cause="lost")
    RayMirror().show(found)
    told = made["dataservice_worker_restarts_total"].told
    assert [(value, tags["role"]) for value, tags in told] == [(2, "worker"), (1, "planner")]


def test_none_has_a_series_a_rank() -> None:
    assert not [name for name in MIRRORED if "dp_rank" in METRICS[name].labels]


def test_it_goes_on_until_something_goes_wrong(
    made: dict[str, FakeMetric], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_metrics, "MIRROR_S", 0.001)
    packs = iter((1, 2))

    def figures() -> Sheet:
        try:
            return sheet(next(packs), 0)
        except StopIteration:
            raise KeyError("no more") from None

    asyncio.run(asyncio.wait_for(keep_mirrored(figures), 5))
    assert sum(value for value, _ in made["dataservice_packs_total"].told) == 2
    assert "Ray's metrics lack this process's: KeyError" in caplog.text


def test_workers_and_stagers_run_in_their_main_thread() -> None:
    """As Ray has it for actors without coroutines; SIGTERM is taken there alone."""
    for actor in (WorkerActor, StagerActor):
        assert not inspect.getmembers(actor, inspect.iscoroutinefunction)
