"""What the coordinator makes of the keeper's news, trainers' waits and people's wishes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from actors.bench import Bench, on_bench
from support.demo_config import demo_settings, write_config

from dataservice.actors import scaling_desk, waits
from dataservice.actors.fleet_view import FleetNews, FleetView
from dataservice.actors.waits import Waits
from dataservice.config import Config, load_config
from dataservice.errors import ConfigError
from dataservice.wire.messages import Scaled, ScaleWorkers


class Clock:
    """In place of time.monotonic."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (waits, scaling_desk):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


# ---- waits --------------------------------------------------------------------------------------


def test_a_share_is_of_the_time_between_a_ranks_own_reports(clock: Clock) -> None:
    seen = Waits()
    for at, rank, waited_s in ((0, 0, 9.0), (1, 1, 9.0), (4, 0, 1.0), (9, 1, 2.0), (10, 0, 0.5)):
        clock.now = 1000.0 + at
        seen.note(1, rank, 0, waited_s)
    assert seen.share() == pytest.approx(2 / 8)  # rank 1; rank 0 waited 1.5 s of 10
    assert seen.share() == pytest.approx(2 / 8)  # nobody has reported since
    clock.now += 3
    seen.note(1, 0, 0, 3.5)
    assert seen.share() == 1.0
    clock.now += 3
    seen.note(2, 0, 0, 3.0)  # another session
    assert seen.share() == 0.0


# ---- the desk -----------------------------------------------------------------------------------


def config_of(folder: Path, **workers: Any) -> Config:
    settings = demo_settings(
        folder, serving={"lease_s": 60.0}, workers={"count": "auto", "max": 8, **workers}
    )
    return load_config(str(write_config(folder, settings)))


def news(bench: Bench, room: int = 4, **more: Any) -> FleetView:
    return bench.coordinator.fleet(FleetNews(ended={}, drain=(), room=room, **more))


async def scale(bench: Bench, workers: int) -> Scaled:
    return await bench.coordinator.scale(ScaleWorkers(workers=workers))


def test_begins_with_the_data_nodes_cores_and_holds_what_is_set_by_hand(tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        assert bench.coordinator.scaling.target == 1
        assert news(bench).target_workers == 4
        assert news(bench, room=6).target_workers == 4  # only the first is to begin with
        scaled = await scale(bench, 7)
        assert (scaled.before, scaled.target) == (4, 7)
        view = news(bench)
        assert (view.target_workers, view.by_hand) == (7, True)
        bench.coordinator.scaling.look()
        assert bench.coordinator.scaling.target == 7
        with pytest.raises(ConfigError, match=r"workers = 9: .*workers\.max = 8"):
            await scale(bench, 9)
        assert (await scale(bench, 0)).target == 7
        bench.coordinator.scaling.look()
        status = await bench.status()
        assert status["target_workers"] == 4
        assert "data nodes' cores bounds it" in status["scaling"]["reason"]

    on_bench(config_of(tmp_path), tmp_path / "s", check)


def test_a_coordinator_started_again_goes_on_with_what_the_keeper_remembers(
    tmp_path: Path,
) -> None:
    async def by_hand(bench: Bench) -> None:
        view = news(bench, target=3, by_hand=True)
        assert (view.target_workers, view.by_hand) == (3, True)

    async def decided(bench: Bench) -> None:
        view = news(bench, target=3)
        assert (view.target_workers, view.by_hand) == (3, False)

    on_bench(config_of(tmp_path), tmp_path / "s", by_hand)
    on_bench(config_of(tmp_path), tmp_path / "s", decided)
    on_bench(config_of(tmp_path, count=2), tmp_path / "s", by_hand)


def test_a_count_in_the_config_is_set_by_hand(tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        view = news(bench)
        assert (view.target_workers, view.by_hand) == (2, True)
        assert (await bench.status())["scaling"]["reason"] == "workers.count is 2"

    on_bench(config_of(tmp_path, count=2), tmp_path / "s", check)


def test_without_autoscaling_the_first_number_stays(tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        assert news(bench).target_workers == 4
        for _ in range(20):
            bench.coordinator.scaling.look()
        assert bench.coordinator.scaling.target == 4
        with pytest.raises(ConfigError, match=r"workers\.autoscale is false"):
            await scale(bench, 0)

    on_bench(config_of(tmp_path, autoscale=False), tmp_path / "s", check)


@pytest.mark.parametrize(("autoscale", "most"), [("cores", 3), ("nodes", 6)])
def test_waits_lead_to_more_workers_within_what_may_be_had(
    tmp_path: Path, clock: Clock, autoscale: str, most: int
) -> None:
    async def check(bench: Bench) -> None:
        desk = bench.coordinator.scaling
        news(bench, room=3)
        await bench.worker("w0")
        session = (await bench.open("run", micro_steps=8)).session
        await bench.one(session, 0, done=0)
        await scale(bench, 1)
        await scale(bench, 0)
        busy_s = 0.0
        while len(bench.leases) < desk.target or busy_s < 600:
            if len(bench.leases) < desk.target:
                await bench.worker(f"w{len(bench.leases)}")
            clock.now += 6
            busy_s += 60.0
            bench.coordinator.shared.waits.note(session, 0, 0, 3.0)
            for number in range(len(bench.leases)):
                figures = {"queued_packs": 20, "busy_s": busy_s, "served_packs": int(busy_s)}
                await bench.pull(f"w{number}", session, 10**9, **figures)
            desk.look()
        assert desk.target == most
        status = (await bench.status())["scaling"]
        assert (status["waited_share"], status["busy_share"]) == (0.5, 1.0)
        assert ("data nodes' cores" in status["reason"]) == (autoscale == "cores")

    config = config_of(tmp_path, autoscale=autoscale)
    config = dataclasses.replace(config, workers=dataclasses.replace(config.workers, max=6))
    on_bench(config, tmp_path / "s", check)
