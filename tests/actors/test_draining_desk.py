"""What the coordinator does when a worker, a node or the whole service is to drain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actors.bench import Bench, on_bench
from support.demo_config import demo_settings, write_config

from dataservice.actors.fleet_view import FleetNews
from dataservice.config import Config, load_config
from dataservice.errors import ConfigError, ServiceUnavailable
from dataservice.wire.draining import Drain, Drained
from dataservice.wire.messages import Progress
from dataservice.wire.staging import RegisterStager


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = demo_settings(tmp_path, serving={"lease_s": 60.0})
    return load_config(str(write_config(tmp_path, settings)))


async def stager(bench: Bench, node: str) -> None:
    await bench.coordinator.register_stager(
        RegisterStager(node=node, host=f"host-{node}", cache_dir="/c", budget_bytes=1)
    )


async def drain(bench: Bench, **what: object) -> Drained:
    return await bench.coordinator.drain(Drain(**what))  # type: ignore[arg-type]


def test_a_worker_leaves_once_what_it_built_is_fetched(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        await bench.pull("w0", session)
        await bench.worker("w1")
        first = await drain(bench, worker="w0")
        assert (first.done, first.workers) == (False, ("w0",))
        assert first.packs > 0
        assert f"packs still to be fetched from it: {first.packs}" in first.words
        assert not (await bench.pull("w0", session, 10**9)).drain
        await bench.steps(session, 1, done=8)  # the trainer has all that was dealt
        assert (await drain(bench, worker="w0", again=True)).packs == 0
        assert (await bench.pull("w0", session, 10**9)).drain
        bench.coordinator.work.ended("w0", "it came to its end")
        left = await drain(bench, worker="w0", again=True)
        assert (left.done, left.words) == (True, "worker w0 has left")
        with pytest.raises(ConfigError, match="there is no worker w0; there are w1"):
            await drain(bench, worker="w0")

    on_bench(config, tmp_path / "s", check)


def test_now_has_others_build_what_nobody_has_fetched(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        given = [a.pack_id for a in (await bench.pull("w0", session)).assignments]
        await bench.worker("w1")
        assert (await drain(bench, worker="w0", now=True)).packs == 0
        assert (await bench.pull("w0", session, 10**9)).drain
        got = {a.pack_id for a in (await bench.pull("w1", session)).assignments}
        assert {*given[1:]} <= got  # the trainer may still fetch the first from w0

    on_bench(config, tmp_path / "s", check)


def test_packs_that_nobody_will_fetch_keep_no_worker(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        await bench.pull("w0", session)
        progress = Progress(
            session=session, dp_rank=0, done_step=1, done_micro_step=0, waited_s=0.0, closing=True
        )
        await bench.coordinator.report_progress(progress)
        await bench.worker("w1")
        assert (await drain(bench, worker="w0")).packs == 0

    on_bench(config, tmp_path / "s", check)


def test_the_lanes_of_a_node_move_and_its_workers_leave(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        shared = bench.coordinator.shared
        for node in ("n0", "n1"):
            await stager(bench, node)
            await bench.worker(f"w-{node}", node)
        assert set(shared.lane_nodes) == {"n0", "n1"}
        told = await drain(bench, node="host-n0")
        assert shared.lane_nodes == ("n1", "n1")
        assert (told.done, told.workers, told.lanes) == (False, ("w-n0",), 0)
        await bench.worker("late", "n0")  # one that was just starting
        assert (await drain(bench, node="n0", again=True)).workers == ("late", "w-n0")
        for worker_id in ("late", "w-n0"):
            assert (await bench.pull(worker_id, 0)).drain
            bench.coordinator.work.ended(worker_id, "it came to its end")
        assert (await drain(bench, node="n0", again=True)).done
        view = bench.coordinator.fleet(
            FleetNews(ended={}, drain=(), room=1, nodes={"n0": "host-n0", "n1": "host-n1"})
        )
        assert view.drained == ("n0",)
        assert (await bench.status())["drained_nodes"] == ["n0"]
        # a stager that leaves in order is none that was lost
        shared.registry.stagers["n0"].heard -= 1000
        bench.coordinator.staging.expire()
        assert "n0" not in shared.registry.stagers
        assert shared.counters["stagers_lost"] == 0

        await stager(bench, "n0")
        assert "n0" not in shared.lane_nodes
        assert "taken back" in (await drain(bench, node="n0", undo=True)).words
        assert set(shared.lane_nodes) == {"n0", "n1"}
        bench.coordinator.fleet(FleetNews(ended={}, drain=(), room=1))
        assert (await drain(bench, node="n7", again=True)).done

    on_bench(config, tmp_path / "s", check)


def test_the_last_node_may_go_and_lanes_are_staged_nowhere(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await stager(bench, "n0")
        assert (await drain(bench, node="n0")).done
        assert bench.coordinator.shared.lane_nodes == ()

    on_bench(config, tmp_path / "s", check)


def test_a_name_of_none_or_of_two_is_refused(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        hosts = {"ab12": "one", "ab34": "two", "cd56": "two"}
        bench.coordinator.fleet(FleetNews(ended={}, drain=(), room=1, nodes=hosts))
        for name, words in {
            "ab": "is the name of several nodes",
            "two": "is the name of several nodes",
            "three": "is no data node; give the host or the id of one of ab12 \\(one\\), ab34",
        }.items():
            with pytest.raises(ConfigError, match=f"node {name} {words}"):
                await drain(bench, node=name)
        assert bench.coordinator.shared.drained_nodes == set()
        assert (await drain(bench, node="cd")).done
        assert bench.coordinator.shared.drained_nodes == {"cd56"}
        with pytest.raises(ConfigError, match="name one of the two"):
            await drain(bench, node="cd", worker="w0")
        with pytest.raises(ConfigError, match="only a node's"):
            await drain(bench, undo=True)

    on_bench(config, tmp_path / "s", check)


def test_a_coordinator_started_again_goes_on_draining(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0", "n0")
        nodes = {"n0": "a", "n1": "b"}
        view = bench.coordinator.fleet(
            FleetNews(
                ended={}, drain=(), room=1, nodes=nodes, drained=("n0", "gone"), winding_down=True
            )
        )
        assert (view.drained, view.winding_down, view.workers) == (("n0",), True, {"w0": True})
        # later the coordinator knows better than the keeper
        await drain(bench, node="n0", undo=True)
        view = bench.coordinator.fleet(
            FleetNews(ended={}, drain=(), room=1, nodes=nodes, drained=("n0",))
        )
        assert view.drained == ()

    on_bench(config, tmp_path / "s", check)


def test_the_service_is_drained_once_ranks_have_what_they_know_of(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        await bench.one(session, 1, done=0)
        turned: list[bool] = []

        async def turn_away() -> None:
            turned.append(True)

        bench.coordinator.draining.turn_away = turn_away
        told = await drain(bench)
        assert not told.done
        assert "those up to step 1 are still read by 1 of 1 ranks: 0" in told.words
        with pytest.raises(ServiceUnavailable, match="hands out no more steps"):
            await bench.steps(session, 2, done=2)
        assert (await drain(bench)).done
        await asyncio.sleep(0)
        assert turned == [True]
        assert (await bench.status())["winding_down"]

    on_bench(config, tmp_path / "s", check)
