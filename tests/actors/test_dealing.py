"""Steps dealt in parts, ranks that are looked at only when they move, holes found without specs."""

import asyncio
import random
from pathlib import Path

import pytest
from actors.bench import START, Bench, on_bench
from hypothesis import given
from hypothesis import strategies as st
from support.demo_config import demo_settings, write_config

from dataservice.actors import dealing, steps
from dataservice.actors.plan_messages import PlannedStep, PlanReply
from dataservice.actors.planner import PART_PACKS, _in_parts, frame
from dataservice.actors.planner_link import _message, _whole
from dataservice.actors.session import Session
from dataservice.config import Config, load_config
from dataservice.core.settings import Grid


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(str(write_config(tmp_path, demo_settings(tmp_path))))


def session_of(dp_size: int) -> Session:
    return Session(
        generation=1,
        run_id="run",
        grid=Grid(dp_size=dp_size, micro_steps=2, packs_per_cell=1),
        state=None,
        hosts=dict.fromkeys(range(dp_size), ("h",)),
        first=(0, 0),
        cursor=START,
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 1)), max_size=40),
)
def test_the_slowest_rank_is_known_without_looking_at_all(
    calls: list[tuple[int, int, int]],
) -> None:
    session = session_of(5)
    for rank, step, micro_step in calls:
        before = session.done_step
        moved = session.progress(rank, 0, (step, micro_step), 0.0)
        assert session.done_step == min(rank.done[0] for rank in session.ranks)
        assert moved == (session.done_step > before)


def test_of_ranks_at_the_same_place_the_one_that_is_silent_is_named() -> None:
    session = session_of(3)
    for rank in (0, 1, 2, 0, 2):
        session.progress(rank, 0, (2, 0), 0.0)
    assert session.slowest().startswith("rank 1 is at step 2 micro-step 0")
    session.progress(1, 0, (2, 1), 0.0)
    assert session.slowest().startswith("rank 0 is at step 2 micro-step 0")


def test_other_calls_are_answered_while_a_step_is_dealt(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "PACKS_AT_ONCE", 1)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        opening = asyncio.ensure_future(bench.open("run", micro_steps=8))
        shared = bench.coordinator.shared
        while shared.session is None or not shared.session.steps:
            await asyncio.sleep(0)
        active = shared.session.steps[0]
        assert None in active.worker  # not all of it yet
        await bench.worker("w1")
        await opening
        while None in active.worker:
            await asyncio.sleep(0)
        queues = (seat.queue for seat in shared.registry.workers.values())
        given = [entry.pack for queue in queues for entry in queue if entry.step == 0]
        assert sorted(given) == list(range(8))

    on_bench(config, tmp_path / "state", check)


def test_specs_are_read_only_of_packs_whose_samples_have_holes(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    plain = steps.spec_of

    def counted(data: bytes):  # type: ignore[no-untyped-def]
        read.append(data)
        return plain(data)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run", micro_steps=4)).session
        cells = await bench.one(session, 0, done=0)
        bad = cells.cells[2][0].pack_id
        await bench.hole("w0", bad)
        monkeypatch.setattr(steps, "spec_of", counted)
        work = await bench.pull("w0", session)
        with_holes = [given.pack_id for given in work.assignments if given.holes]
        assert with_holes == [bad]
        assert len(read) == 1

    on_bench(config, tmp_path / "state", check)


def test_a_step_comes_in_parts_and_is_whole() -> None:
    count = 2 * PART_PACKS + 7
    chosen = random.Random(1)
    step = PlannedStep(
        end=False,
        next_cursor=START,
        pack_ids=tuple(f"0.0.{i}" for i in range(count)),
        specs=tuple(chosen.randbytes(chosen.randrange(2000)) for _ in range(count)),
    )
    messages = _in_parts(step)
    assert len(messages) == 1 + 3

    async def read() -> PlanReply:
        pipe = asyncio.StreamReader()
        pipe.feed_data(b"".join(map(frame, messages)))
        return await _whole(await _message(PlanReply, pipe), pipe)

    assert asyncio.run(read()).step == step
