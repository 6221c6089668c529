"""The coordinator's desks against small fakes: late ranks, slow peers, failed packs, leases."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from actors.bench import DIGEST, NUM_LANES, Bench, cursor_at, on_bench

from dataservice.actors import work_desk
from dataservice.actors.fleet_view import FleetNews
from dataservice.actors.plan_messages import PlannedStep, StepRequest
from dataservice.actors.planning_ahead import PLANNER_RESTARTS
from dataservice.actors.resuming import STATE_VERSION
from dataservice.config import Config
from dataservice.errors import (
    ConfigError,
    DataServiceError,
    HoleBudgetExceeded,
    LeaseLost,
    ResumeRefused,
    SessionFenced,
)
from dataservice.wire.messages import (
    ReportHoles,
    ResumeState,
)
from dataservice.wire.staging import RegisterStager
from dataservice.wire.states import sealed


@pytest.fixture
def config(tmp_path: Path) -> Config:
    from support.demo_config import demo_settings, write_config

    from dataservice.config import load_config

    return load_config(str(write_config(tmp_path, demo_settings(tmp_path))))


def test_a_late_rank_of_an_older_run_does_not_fence_the_newer_one(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        assert not (await bench.open("old", 0, 2)).ready
        assert (await bench.open("new", 0, 1)).ready
        with pytest.raises(SessionFenced, match="newer run"):
            await bench.open("old", 1, 2)
        assert (await bench.open("new", 0, 1)).ready

    on_bench(config, tmp_path / "state", check)


def test_a_peer_that_is_a_step_behind_still_gets_its_packs(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run")).session
        for step in range(3):
            await bench.one(session, step, done=step)
        behind = await bench.one(session, 1, done=1)
        assert behind.step == 1
        with pytest.raises(ConfigError, match="step 0 is over"):
            await bench.steps(session, 0, done=0)

    on_bench(config, tmp_path / "state", check)


def test_a_step_that_is_over_is_told_with_new_work(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run")).session
        for step in range(3):
            await bench.one(session, step, done=step)
        await asyncio.sleep(0.05)  # until all steps are planned that may be
        before = await bench.pull("w0", session)
        last = max(a.sequence for a in before.assignments)
        planned, plan = asyncio.Event(), bench.planner.step

        async def later(request: StepRequest) -> PlannedStep:
            await planned.wait()
            return await plan(request)

        monkeypatch.setattr(bench.planner, "step", later)
        waits = asyncio.ensure_future(bench.pull("w0", session, after=last))
        await asyncio.sleep(0)
        await bench.one(session, 3, done=3)
        for _ in range(20):
            await asyncio.sleep(0)
        planned.set()
        work = await waits
        assert work.held_step > before.held_step
        assert work.assignments

    on_bench(config, tmp_path / "state", check)


def test_a_failed_pack_is_tried_elsewhere_with_growing_pauses(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_desk, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(work_desk, "LONGEST_PAUSE_S", 0.02)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.worker("w1")
        session = (await bench.open("run")).session
        cells = await bench.one(session, 0, done=0)
        place = cells.cells[0][0]
        first = place.endpoint.partition(":")[0]
        other = {"w0": "w1", "w1": "w0"}[first]
        await bench.fail(first, session, place.pack_id, fatal=False)
        assert (await bench.one(session, 0, done=0)).cells[0][0].endpoint == place.endpoint
        await asyncio.sleep(0.1)
        assert (await bench.one(session, 0, done=0)).cells[0][0].endpoint == f"{other}:1"
        work = await bench.pull(other, session)
        mine = [a for a in work.assignments if a.pack_id == place.pack_id]
        assert [a.storage_holes for a in mine] == [False]
        for _ in range(work_desk.STORAGE_HOLE_ATTEMPTS - 1):
            await bench.fail(other, session, place.pack_id, fatal=False)
        await asyncio.sleep(0.1)
        owner = (await bench.one(session, 0, done=0)).cells[0][0].endpoint.partition(":")[0]
        work = await bench.pull(owner, session)
        assert any(a.storage_holes for a in work.assignments if a.pack_id == place.pack_id)
        for _ in range(work_desk.PACK_ATTEMPTS - work_desk.STORAGE_HOLE_ATTEMPTS):
            await bench.fail(owner, session, place.pack_id, fatal=False)
        with pytest.raises(DataServiceError, match="connection refused"):
            await bench.steps(session, 0, done=0)

    on_bench(config, tmp_path / "state", check)


def test_a_planning_process_that_ends_is_replaced(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        bench.planner.breaks = 2
        session = (await bench.open("run")).session
        assert (await bench.one(session, 0, done=0)).step == 0
        for step in range(1, 20):  # of a run of months
            bench.planner.breaks = 1
            await bench.one(session, step, done=step)
        assert (await bench.status())["counters"]["planners_lost"] > PLANNER_RESTARTS

    on_bench(config, tmp_path / "state", check)


def test_new_lane_homes_count_from_the_first_step_not_planned_yet(
    config: Config, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, ranks_per_node=1)

    async def check(bench: Bench) -> None:
        session = await bench.begun()
        ahead = config.serving.plan_ahead_steps
        await bench.coordinator.register_stager(
            RegisterStager(node="n0", host="h", cache_dir="/c", budget_bytes=1)
        )
        for step in range(1, ahead + 1):
            await bench.one(session, step, done=step)
        homes = {r.cursor.step: r.cursor.lane_homes for r in bench.planner.asked}
        assert homes[ahead - 1] == (-1, -1)
        assert homes[ahead] == (0, 0)

    on_bench(config, tmp_path / "state", check)


def test_a_restarted_coordinator_keeps_the_homes_of_steps_handed_out(
    config: Config, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, ranks_per_node=1)

    async def before(bench: Bench) -> None:
        await bench.begun()

    async def after(bench: Bench) -> None:
        await bench.coordinator.register_stager(
            RegisterStager(node="n0", host="h", cache_dir="/c", budget_bytes=1)
        )
        await bench.worker("w0")
        for step in range(4):
            await bench.one(1, step, done=step)
        homes = {r.cursor.step: r.cursor.lane_homes for r in bench.planner.asked}
        assert homes[0] == homes[5] == (-1, -1)

    on_bench(config, tmp_path / "state", before)
    on_bench(config, tmp_path / "state", after)


def test_a_newer_run_that_still_gathers_fences_the_one_before(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.open("old", 0, 2)
        assert (await bench.open("new", 0, 2)).missing_ranks == (1,)
        with pytest.raises(SessionFenced, match="newer run"):
            await bench.open("old", 1, 2)
        assert (await bench.open("new", 1, 2)).ready

    on_bench(config, tmp_path / "state", check)


def test_a_rank_that_left_counts_as_missing(config: Config, tmp_path: Path) -> None:
    serving = dataclasses.replace(config.serving, open_timeout_s=0.2)
    config = dataclasses.replace(config, serving=serving)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.open("run", 0, 2)
        await asyncio.sleep(0.3)
        assert (await bench.open("run", 1, 2)).missing_ranks == (0,)
        assert (await bench.open("run", 0, 2)).ready

    on_bench(config, tmp_path / "state", check)


def test_a_rank_that_comes_again_after_a_restart_is_not_put_further_on(
    config: Config, tmp_path: Path
) -> None:
    async def before(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run")).session
        for step in range(40):
            await bench.one(session, step, done=step)

    async def after(bench: Bench) -> None:
        await bench.worker("w0")
        opened = await bench.open("run")
        assert (opened.first_step, opened.first_micro_step) == (0, 0)
        with pytest.raises(ConfigError, match="step 0 is over"):
            await bench.steps(opened.session, 0, done=0)

    on_bench(config, tmp_path / "state", before)
    on_bench(config, tmp_path / "state", after)


def test_a_restarted_coordinator_refuses_another_decoder(config: Config, tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.open("run")

    async def after(bench: Bench) -> None:
        with pytest.raises(ResumeRefused, match="same image libraries"):
            await bench.worker("w0", decoder="pillow 99")
        await bench.worker("w0")
        with pytest.raises(ConfigError, match="the others with pil"):
            await bench.worker("w1", decoder="pillow 99")

    on_bench(config, tmp_path / "state", before)
    on_bench(config, tmp_path / "state", after)


def test_a_new_run_may_have_another_decoder_than_the_last_one(
    config: Config, tmp_path: Path
) -> None:
    sessions: list[int] = []

    async def before(bench: Bench) -> None:
        await bench.worker("w0")
        sessions.append((await bench.open("run")).session)

    async def after(bench: Bench) -> None:
        with pytest.raises(ResumeRefused, match=r"run run began with pil: .* a new run"):
            await bench.worker("w0", decoder="pillow 99")
        assert not (await bench.open("next", 0, 2)).ready
        await bench.worker("w0", decoder="pillow 99")
        with pytest.raises(ResumeRefused, match="run run began with pil"):
            await bench.steps(sessions[0], 0, done=0)
        assert not (await bench.open("next", 1, 2)).missing_ranks
        opened = await bench.open("next", 0, 2)
        assert opened.ready and opened.decoder.startswith("pillow 99")

    on_bench(config, tmp_path / "state", before)
    on_bench(config, tmp_path / "state", after)


def test_a_resumed_step_keeps_the_placement_it_was_handed_out_with(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        cursor = dataclasses.replace(cursor_at(3, 6, (1, 0)), ranks_per_node=1)
        state = sealed(
            ResumeState(
                version=STATE_VERSION,
                job="test",
                plan_digest=DIGEST,
                decoder="pil",
                cursor=cursor,
                micro_step=1,
                dp_size=1,
                micro_steps=2,
                packs_per_cell=1,
            )
        )
        session = (await bench.open("run", micro_steps=2, state=state)).session
        await bench.one(session, 4, done=3)
        placed = {
            r.cursor.step: (r.cursor.ranks_per_node, r.cursor.lane_homes)
            for r in bench.planner.asked
        }
        assert placed[3] == (1, (1, 0))
        assert placed[4] == (0, (-1, -1))

    on_bench(config, tmp_path / "state", check)


@pytest.mark.parametrize(
    ("change", "inside", "words"),
    [
        ({"micro_step": 2}, {}, "micro_step 2, should be from 0 to 1"),
        ({"micro_step": -1}, {}, "micro_step -1"),
        ({"dp_size": 0}, {}, "dp_size 0, should be from 1"),
        ({}, {"step": -1}, "step -1"),
        ({}, {"phase": -1}, "phase -1"),
        ({}, {"phase": 5}, "phase 5 of digest"),
        ({}, {"next_pack": (-4,)}, "next_pack -4"),
        ({}, {"next_pack": (1 << 61,)}, "next_pack"),
        ({}, {"next_pack": (1, 1)}, "2 values in next_pack, should be 1"),
        ({}, {"next_lane": ()}, "0 values in next_lane, should be 1"),
        ({}, {"next_lane": (NUM_LANES,)}, "next_lane 2, should be from 0 to 1"),
        ({}, {"lanes": ((0, 0),)}, "1 values in lanes, should be 2"),
        ({}, {"lanes": ((0, 0), (0,))}, r"lanes\[1\] \[0\], should be a window"),
        ({}, {"lanes": ((0, 0), (1 << 62, 0))}, "lanes 4611686018427387904"),
        ({}, {"lane_homes": (0,)}, "1 values in lane_homes, should be 2"),
        ({}, {"lane_homes": (0, -7)}, "lane_homes -7"),
        ({"micro_step": 1}, {"ranks_per_node": 2}, "ranks_per_node 2"),
        ({}, {"next_pack": (7,)}, "the seal"),
        ({}, {"lanes": ((3, 1), (3, 0))}, "the seal"),
        ({}, {"step": 4}, "the seal"),
        ({}, {"lane_homes": (0, 1)}, "the seal"),
        ({"micro_step": 1}, {}, "the seal"),
        ({"dp_size": 2}, {}, "the seal"),
        ({"seal": ""}, {}, "the seal none"),
    ],
)
def test_a_damaged_state_is_refused_before_anything_is_planned(
    change: dict[str, Any], inside: dict[str, Any], words: str, config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        good = sealed(
            ResumeState(
                version=STATE_VERSION,
                job="test",
                plan_digest=DIGEST,
                decoder="pil",
                cursor=cursor_at(3, 6),
                micro_step=0,
                dp_size=1,
                micro_steps=2,
                packs_per_cell=1,
            )
        )
        cursor = dataclasses.replace(good.cursor, **inside)
        state = dataclasses.replace(good, cursor=cursor, **change)
        with pytest.raises(ResumeRefused, match=f"{words}.*resume from another checkpoint"):
            await bench.open("run", micro_steps=2, state=state)
        assert bench.planner.asked == []

    on_bench(config, tmp_path / "state", check)


def test_sizes_that_cannot_be_are_refused_at_the_door(config: Config, tmp_path: Path) -> None:
    config = dataclasses.replace(config, ranks_per_node=2)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        with pytest.raises(ConfigError, match="ranks_per_node = 2"):
            await bench.open("run", 0, 3)
        with pytest.raises(ConfigError, match="packs a step"):
            await bench.open("run", 0, 2, micro_steps=2_000_000_000)
        assert bench.planner.asked == []

    on_bench(config, tmp_path / "state", check)


def test_without_a_worker_the_session_says_what_it_waits_for(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        opened = await bench.open("run")
        assert not opened.ready
        assert opened.missing_ranks == ()
        assert opened.waiting_for == "no worker is alive"
        bench.coordinator.fleet(FleetNews(ended={}, drain=(), room=1, without_room=2))
        assert "Ray has no room for 2 of them" in (await bench.open("run")).waiting_for
        assert (await bench.status())["workers_without_room"] == 2

    on_bench(config, tmp_path / "state", check)


def test_a_worker_whose_lease_ended_is_told_to_join_anew(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        lease = bench.leases["w0"]
        await bench.worker("w0")
        bench.leases["w0"], newer = lease, bench.leases["w0"]
        with pytest.raises(LeaseLost, match="register anew"):
            await bench.pull("w0", 0)
        bench.leases["w0"] = newer
        await bench.pull("w0", 0)

    on_bench(config, tmp_path / "state", check)


def test_past_the_hole_budget_the_run_fails_and_names_the_worst_shard(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        assert (await bench.status())["state"] == "serving"
        with pytest.raises(HoleBudgetExceeded, match=r"worst shard s/bad\.jsonl with 9"):
            for number in range(20):
                await bench.coordinator.report_holes(
                    ReportHoles(
                        worker_id="w0",
                        lease=bench.leases["w0"],
                        pack_id="0.0",
                        holes={f"s/bad.jsonl@{number}#0": "truncated JPEG"},
                    )
                )
        with pytest.raises(HoleBudgetExceeded, match=r"errors\.max_hole_share"):
            await bench.steps(session, 1, done=1)
        assert (await bench.status())["state"] == "failed"

    on_bench(config, tmp_path / "state", check)
