"""Packs that move to a worker that joins, and from one that leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actors.bench import Bench, on_bench
from support.demo_config import demo_settings, write_config

from dataservice.actors import sharing
from dataservice.config import Config, load_config
from dataservice.errors import PackMoved


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(sharing, "JOIN_S", 0.0)
    settings = demo_settings(tmp_path, serving={"lease_s": 60.0})
    return load_config(str(write_config(tmp_path, settings)))


async def begun(bench: Bench) -> tuple[int, list[str], int]:
    """Session, packs of w0, which has all that is planned, and the sequence of the last."""
    await bench.worker("w0")
    session = (await bench.open("run", micro_steps=8)).session
    steps = bench.coordinator.shared.config.serving.plan_ahead_steps
    packs: dict[str, None] = {}
    after = 0
    while len(packs) < 8 * steps:
        work = await bench.pull("w0", session, after)
        packs.update(dict.fromkeys(a.pack_id for a in work.assignments))
        after = max([after, *(a.sequence for a in work.assignments)])
    return session, list(packs), after


def test_a_worker_that_joins_gets_what_another_gives_back(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session, packs, after = await begun(bench)
        await bench.pull("w0", session, after, queued_packs=40)
        await bench.worker("w1")
        await asyncio.sleep(0.05)
        work = await bench.pull("w0", session, after, queued_packs=40)
        assert work.give_back == 20
        assert (await bench.pull("w0", session, after, queued_packs=40)).give_back == 0
        given = packs[1:41:2]
        await bench.pull("w0", session, after, queued_packs=20, returned=tuple(given))
        got = await bench.pull("w1", session)
        assert [a.pack_id for a in got.assignments] == given
        with pytest.raises(PackMoved, match=f"worker w1 builds pack {given[0]} now"):
            await bench.ask("w0", session, given[0])
        assert (await bench.ask("w1", session, given[0])).pack_id == given[0]
        # the same answer once more, as after one that was lost, moves nothing
        await bench.pull("w0", session, after, queued_packs=20, returned=tuple(given))
        assert (await bench.status())["counters"]["packs_shared"] == 20

    on_bench(config, tmp_path / "s", check)


def test_one_that_leaves_gives_back_what_it_has_not_begun(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session, packs, after = await begun(bench)
        await bench.pull("w0", session, after, queued_packs=46)
        bench.coordinator.work.drain(("w0",))  # nobody else is there
        assert (await bench.pull("w0", session, after, queued_packs=46)).give_back == 0
        await bench.worker("w1")
        await bench.worker("w2", node="n1")
        await asyncio.sleep(0.05)
        bench.coordinator.work.drain(("w0",))
        work = await bench.pull("w0", session, after, queued_packs=46)
        assert (work.give_back, work.drain) == (46, False)
        await bench.pull("w0", session, after, returned=tuple(packs[2:]))
        for worker_id in ("w1", "w2"):
            assert len((await bench.pull(worker_id, session)).assignments) == 23
        assert not (await bench.pull("w0", session, after)).drain  # two are still to be fetched
        await bench.steps(session, 1, done=1)
        assert (await bench.pull("w0", session, after)).drain

    on_bench(config, tmp_path / "s", check)


def test_packs_stay_on_the_node_that_stages_their_lane(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        session, packs, after = await begun(bench)
        bench.coordinator.shared.lane_nodes = ("n0", "n1")  # packs are dealt to lanes in turn
        await bench.pull("w0", session, after, queued_packs=40)
        for worker_id, node in (("w1", "n0"), ("w2", "n1")):
            await bench.worker(worker_id, node)
        await asyncio.sleep(0.05)
        assert (await bench.pull("w0", session, after, queued_packs=40)).give_back > 0
        await bench.pull("w0", session, after, returned=tuple(packs))
        for worker_id, first in (("w1", 0), ("w2", 1)):
            got = await bench.pull(worker_id, session)
            assert [a.pack_id for a in got.assignments] == packs[first::2]

    on_bench(config, tmp_path / "s", check)
