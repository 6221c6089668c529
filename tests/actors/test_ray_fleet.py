from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.demo_config import demo_config

from dataservice.actors import ray_fleet
from dataservice.actors.fleet_view import FleetNews, FleetView
from dataservice.actors.ray_fleet import RayFleet
from dataservice.actors.ray_nodes import DataNode
from dataservice.actors.worker_memory import ENVIRONMENT

NODE_ID = "ab" * 28
NODE = DataNode(node_id=NODE_ID, host="h0", cores=8, room=8)


class FakeRay:
    """A node, and actors that start and never end."""

    exceptions = SimpleNamespace(RayError=OSError)

    def __init__(self) -> None:
        self.stopped: list[Any] = []
        self.killed: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        """Options of the actors."""

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": NODE_ID,
                "Alive": True,
                "NodeManagerHostname": "h0",
                "Resources": {"data_node": 1.0, "CPU": 8.0},
            }
        ]

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)
        return lambda _: SimpleNamespace(remote=lambda **_: FakeActor(self.stopped))

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], references

    def kill(self, handle: Any) -> None:
        self.killed.append(handle)


class FakeActor:
    def __init__(self, stopped: list[Any]) -> None:
        self.run = self.node = SimpleNamespace(remote=object)
        self.stop = SimpleNamespace(remote=lambda: stopped.append(self))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_fleet, "ray", fake)
    return fake


def fleet_of(folder: Path, *, own_ray: bool, cache_dir: str | None = None) -> RayFleet:
    config = demo_config(folder, staging={"cache_dir": cache_dir})
    return RayFleet(config, "127.0.0.1:7070", own_ray=own_ray)


def keep(
    fleet: RayFleet, target: int, *known: str, drained: tuple[str, ...] = ()
) -> list[FleetNews]:
    """With a coordinator that knows these workers and drained nodes; what it was told."""
    told: list[FleetNews] = []

    def tell(news: FleetNews) -> FleetView:
        told.append(news)
        return FleetView(
            target_workers=target,
            by_hand=False,
            workers=dict.fromkeys(known, bool(drained)),
            stagers=(),
            drained=drained,
        )

    fleet.keep(tell)
    return told


@pytest.mark.parametrize("own_ray", [True, False])
def test_workers_get_their_environment_where_ray_does_not_have_it(
    ray: FakeRay, tmp_path: Path, own_ray: bool
) -> None:
    fleet = fleet_of(tmp_path, own_ray=own_ray)
    keep(fleet, 1)
    (options,) = ray.asked
    assert options.get("runtime_env") == (None if own_ray else {"env_vars": ENVIRONMENT})


def test_a_worker_that_does_not_come_back_to_a_new_coordinator_is_replaced_where_it_was(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(tmp_path, own_ray=False)
    keep(fleet, 1)
    (worker,) = fleet._workers
    keep(fleet, 1, worker)
    fleet.expect_anew()
    keep(fleet, 1)
    assert not ray.killed  # it may take as long as a new one
    with monkeypatch.context() as patch:
        patch.setattr(ray_fleet, "START_GRACE_S", 0.0)
        keep(fleet, 1)
    assert len(ray.killed) == 1
    (other,) = fleet._workers.items()
    assert other[0] != worker
    assert other[1].node == NODE_ID


def test_nothing_more_is_started_where_a_worker_did_not_come_up(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(tmp_path, own_ray=False)
    keep(fleet, 1)
    monkeypatch.setattr(ray_fleet, "START_GRACE_S", 0.0)
    keep(fleet, 1)
    assert len(ray.killed) == 1
    assert fleet._room(NODE) < NODE.room


def test_on_a_drained_node_nothing_starts_and_the_stager_stays_for_its_workers(
    ray: FakeRay, tmp_path: Path
) -> None:
    fleet = fleet_of(tmp_path, own_ray=False, cache_dir=str(tmp_path / "cache"))
    keep(fleet, 2)
    up, _coming = fleet._workers
    keep(fleet, 2, up)
    told = keep(fleet, 2, up, drained=(NODE_ID,))
    assert told[0].nodes == {NODE_ID: "h0"}
    assert list(fleet._workers) == [up]
    assert len(ray.killed) == 1
    assert not ray.stopped
    started = len(ray.asked)
    again = keep(fleet, 2, up, drained=(NODE_ID,))
    assert len(ray.asked) == started
    assert (again[0].drained, again[0].room) == ((NODE_ID,), 0)
    del fleet._workers[up]  # it has left
    keep(fleet, 2, drained=(NODE_ID,))
    assert ray.stopped == [fleet._stagers[NODE_ID].handle]


def test_a_worker_for_any_node_is_not_for_a_drained_one(ray: FakeRay, tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, own_ray=False)
    fleet._last = FleetView(
        target_workers=1, by_hand=False, workers={}, stagers=(), drained=("n1", "n2")
    )
    fleet._start_worker(None)
    (options,) = ray.asked
    assert options["label_selector"] == {"ray.io/node-id": "!in(n1,n2)"}
    (waiting,) = fleet._workers
    keep(fleet, 1, drained=("n1", "n2"))
    assert list(fleet._workers) == [waiting]
    keep(fleet, 1)  # they were taken back
    assert len(ray.killed) == 1
    assert waiting not in fleet._workers
    assert "label_selector" not in ray.asked[-1]
