"""What the coordinator does about bad pictures, and workers that die of them or retire."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from actors.bench import DIGEST, Bench, cursor_at, on_bench, sample_of
from support.demo_config import demo_settings, write_config

from dataservice.actors.quarantine import QUARANTINE
from dataservice.actors.resuming import STATE_VERSION
from dataservice.config import Config, load_config
from dataservice.errors import (
    DataServiceError,
    ImageError,
    RecordError,
    ResumeRefused,
    ServiceUnavailable,
)
from dataservice.wire.messages import Assignment, ResumeState
from dataservice.wire.states import sealed


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """With leases that outlast any test: workers end when it says so."""
    settings = demo_settings(tmp_path, serving={"lease_s": 60.0})
    return load_config(str(write_config(tmp_path, settings)))


def under(config: Config, policy: Any) -> Config:
    return dataclasses.replace(config, errors=dataclasses.replace(config.errors, bad_image=policy))


def by_pack(assignments: tuple[Assignment, ...]) -> dict[str, Assignment]:
    return {a.pack_id: a for a in assignments}


def quarantined(config: Config) -> list[dict[str, Any]]:
    path = Path(config.state_dir) / QUARANTINE
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- workers that end ---------------------------------------------------------------------------


async def endpoints_of(bench: Bench, session: int, done: int = 0) -> dict[str, str]:
    """Worker id by pack id, of the first step from `done` on."""
    cells = await bench.one(session, done, done)
    return {p.pack_id: p.endpoint.partition(":")[0] for cell in cells.cells for p in cell}


def test_what_a_worker_may_have_been_building_that_ended_without_a_word_is_built_isolated(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.worker("w1")
        session = (await bench.open("run", micro_steps=8)).session
        owners = await endpoints_of(bench, session)
        assert set(owners.values()) == {"w0", "w1"}
        before = await bench.pull("w1", session)
        assert not any(a.isolated for a in before.assignments)
        last = max(a.sequence for a in before.assignments)
        lost = sorted(p for p, owner in owners.items() if owner == "w0")
        given = max(a.sequence for a in (await bench.pull("w0", session)).assignments)
        await bench.pull("w0", session, after=given, reach=[*lost[:2], "99.0"])
        await bench.lose("w0")
        moved = by_pack((await bench.pull("w1", session, after=last)).assignments)
        assert set(lost) <= set(moved)
        assert {p for p, a in moved.items() if a.isolated} == set(lost[:2])
        assert not any(a.alone for a in moved.values())
        for pack_id in owners:
            asked = await bench.ask("w1", session, pack_id)
            assert (asked.isolated, asked.alone) == (pack_id in lost[:2], False)
        counters = (await bench.status())["counters"]
        assert (counters["workers_lost"], counters["packs_suspected"]) == (1, 2)
        await bench.pull("w1", session, after=max(a.sequence for a in moved.values()))
        # a process that comes back under its name has ended as well
        await bench.worker("w1")
        again = by_pack((await bench.pull("w1", session)).assignments)
        assert {p for p, a in again.items() if a.isolated} == set(moved), "the second loss"
        assert not any(a.alone for a in again.values()), "it named none of them"

    on_bench(config, tmp_path / "state", check)


async def ended_by(bench: Bench, session: int, pack_id: str, names: list[str]) -> None:
    """One worker after another, by one pack of many."""
    for name in names:
        await bench.worker(name)
        await bench.pull(name, session, reach=[pack_id])
        asked = await bench.ask(name, session, pack_id)
        if asked.alone:
            await bench.ask(name, session, pack_id, begins=True)
        await bench.lose(name)


@pytest.mark.parametrize("policy", ["hole", "fallback"])
def test_a_pack_that_ends_one_worker_after_another_becomes_holes_and_no_other_does(
    policy: str, config: Config, tmp_path: Path
) -> None:
    config = under(config, policy)

    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run", micro_steps=2)).session
        await bench.one(session, 0, done=0)
        await bench.lose("w0")
        await ended_by(bench, session, "0.1", ["w1", "w2", "w3", "w4"])
        assert (await bench.status())["holes"] == 0
        await ended_by(bench, session, "0.1", ["w5"])
        await bench.worker("w6")
        reason = "3 workers ended while they built pack 0.1, which it is in"
        keys = [f"{sample_of('0.1')}#{part}" for part in ("record", 0)]
        assert (await bench.ask("w6", session, "0.1")).holes == dict.fromkeys(keys, reason)
        assert (await bench.ask("w6", session, "0.0")).holes == {}
        status = await bench.status()
        assert (status["state"], status["holes"]) == ("serving", 2)
        assert status["counters"]["packs_condemned"] == 1
        # it goes on: nothing of it is left to leave out
        await bench.lose("w6")
        await ended_by(bench, session, "0.1", ["w7"])
        words = rf"pack 0\.1 ended 4 workers.*without any of its samples \({sample_of('0.1')}\)"
        with pytest.raises(DataServiceError, match=words):
            await bench.steps(session, 0, done=0)

    on_bench(config, tmp_path / "state", check)


def test_where_holes_are_not_allowed_such_a_pack_fails_the_job_and_is_named(
    config: Config, tmp_path: Path
) -> None:
    config = under(config, "fail")

    async def check(bench: Bench) -> None:
        session = await bench.begun()
        await bench.lose("w0")
        await ended_by(bench, session, "0.0", ["w1", "w2", "w3", "w4", "w5"])
        words = rf"sample {sample_of('0.0')}.*3 workers ended while they built pack 0\.0"
        with pytest.raises(RecordError, match=words):
            await bench.steps(session, 0, done=0)

    on_bench(config, tmp_path / "state", check)


def test_a_pack_that_is_built_before_its_worker_ends_is_not_blamed(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        await bench.lose("w0")
        await ended_by(bench, session, "0.0", ["w1", "w2", "w3", "w4"])
        for name in ("w5", "w6", "w7"):
            await bench.worker(name)
            assert (await bench.ask(name, session, "0.0", begins=True)).alone
            await bench.pull(name, session)
            await bench.lose(name)
        assert (await bench.status())["holes"] == 0

    on_bench(config, tmp_path / "state", check)


def test_packs_that_were_given_out_are_no_suspects(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run", micro_steps=2)).session
        await bench.one(session, 0, done=0)
        await bench.one(session, 1, done=1)
        await bench.pull("w0", session, reach=["0.0", "1.0"])
        await bench.lose("w0")
        await bench.worker("w1")
        assert not (await bench.ask("w1", session, "0.0")).isolated
        assert (await bench.ask("w1", session, "1.0")).isolated

    on_bench(config, tmp_path / "state", check)


def test_a_worker_that_never_asked_for_work_makes_no_suspects(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run", micro_steps=2)).session
        owners = await endpoints_of(bench, session)
        await bench.lose("w0")
        await bench.worker("w1")
        for pack_id in owners:
            assert not (await bench.ask("w1", session, pack_id)).isolated
        counters = (await bench.status())["counters"]
        assert counters["workers_lost"] == 1 and "packs_suspected" not in counters

    on_bench(config, tmp_path / "state", check)


def test_a_retiring_worker_loses_its_packs_at_once_and_may_leave(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.worker("w1")
        session = (await bench.open("run", micro_steps=8)).session
        owners = await endpoints_of(bench, session)
        mine = {pack_id for pack_id, owner in owners.items() if owner == "w0"}
        assert mine
        others = (await bench.pull("w1", session)).assignments
        last = max(a.sequence for a in others)
        work = await bench.pull("w0", session, retiring="4 decodes hang")
        assert work.drain and work.assignments == ()
        assert set((await endpoints_of(bench, session)).values()) == {"w1"}
        moved = by_pack((await bench.pull("w1", session, after=last)).assignments)
        assert mine <= set(moved)
        assert not any(a.isolated for a in moved.values())
        with pytest.raises(ServiceUnavailable, match="w0 retires"):
            await bench.ask("w0", session, min(mine))
        status = await bench.status()
        told = {w["id"]: (w["draining"], w["retiring"]) for w in status["workers"]}
        assert told == {"w0": (True, "4 decodes hang"), "w1": (False, "")}
        assert status["counters"]["workers_retired"] == 1
        assert (await bench.pull("w0", session, retiring="4 decodes hang")).drain
        await bench.lose("w0")
        counters = (await bench.status())["counters"]
        assert counters["workers_retired"] == 1
        assert "workers_lost" not in counters and "packs_suspected" not in counters

    on_bench(config, tmp_path / "state", check)


def test_packs_of_the_last_worker_wait_for_the_next_when_it_retires(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.begun()
        assert (await bench.pull("w0", session, retiring="stuck")).drain
        assert (await bench.steps(session, 0, done=0)).blocked_by == (
            "no live worker for a pack of step 0"
        )
        await bench.worker("w1")
        assert set((await endpoints_of(bench, session)).values()) == {"w1"}

    on_bench(config, tmp_path / "state", check)


# ---- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["hole", "fallback"])
def test_a_hole_is_journalled_told_and_given_to_everybody(
    policy: str, config: Config, tmp_path: Path
) -> None:
    config = under(config, policy)
    key = f"{sample_of('0.0')}#0"

    async def before(bench: Bench) -> None:
        session = await bench.begun()
        assert (await bench.hole("w0", "0.0")).holes == {key: "truncated JPEG"}
        assert (await bench.hole("w0", "0.0", reason="another")).holes == {key: "truncated JPEG"}
        await check(bench, session)

    async def check(bench: Bench, session: int) -> None:
        assert (await bench.ask("w0", session, "0.0")).holes == {key: "truncated JPEG"}
        assert (await bench.ask("w0", session, "1.0")).holes == {}
        status = await bench.status()
        assert (status["holes"], status["bad_image"]) == (1, policy)
        assert status["hole_reasons"] == {key: "truncated JPEG (a.jpg in src/a.zip)"}
        assert status["worst_shards"] == {"src/a.jsonl": 1}
        assert status["quarantine"] == str(Path(config.state_dir) / QUARANTINE)
        (row,) = quarantined(config)
        found = {name: row[name] for name in ("sample", "image", "member", "archive", "policy")}
        assert found == {
            "sample": sample_of("0.0"),
            "image": 0,
            "member": "a.jpg",
            "archive": "a.zip",
            "policy": policy,
        }
        assert (row["pack"], row["plan"]) == (0, DIGEST[:12])

    async def after(bench: Bench) -> None:
        session = await bench.begun()
        await check(bench, session)

    state = tmp_path / "state"
    on_bench(config, state, before)
    on_bench(config, state, after)
    (state / QUARANTINE).unlink()
    on_bench(config, state, after)


def test_a_hole_of_a_pack_that_nobody_needs_is_not_decided(config: Config, tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        await bench.open("run")
        with pytest.raises(ServiceUnavailable, match=r"pack 99\.0 is needed by nobody"):
            await bench.hole("w0", "99.0")
        assert (await bench.status())["holes"] == 0

    on_bench(config, tmp_path / "state", check)


@pytest.mark.parametrize(("number", "kind"), [(0, ImageError), ("record", RecordError)])
def test_where_holes_are_not_allowed_the_first_fails_the_job_and_is_named(
    number: int | str, kind: type[Exception], config: Config, tmp_path: Path
) -> None:
    config = under(config, "fail")

    async def check(bench: Bench) -> None:
        session = await bench.begun()
        words = rf"source src, shard a\.jsonl, sample {sample_of('0.0')}.*truncated JPEG.*bad_image"
        with pytest.raises(kind, match=words):
            await bench.hole("w0", "0.0", number)
        with pytest.raises(kind, match=words):
            await bench.steps(session, 1, done=1)
        status = await bench.status()
        assert (status["state"], status["holes"]) == ("failed", 0)
        assert "truncated JPEG" in status["session"]["failure"]
        assert not (Path(config.state_dir) / QUARANTINE).exists()

    on_bench(config, tmp_path / "state", check)


def test_holes_of_an_earlier_run_are_not_given_where_none_is_allowed(
    config: Config, tmp_path: Path
) -> None:
    async def before(bench: Bench) -> None:
        await bench.begun("old")
        await bench.hole("w0", "0.0")

    async def after(bench: Bench) -> None:
        session = await bench.begun("new")
        assert (await bench.ask("w0", session, "0.0")).holes == {}
        with pytest.raises(ImageError, match="truncated"):
            await bench.hole("w0", "0.0")

    on_bench(config, tmp_path / "state", before)
    on_bench(under(config, "fail"), tmp_path / "state", after)


def test_a_run_does_not_go_on_under_another_policy(config: Config, tmp_path: Path) -> None:
    words = "errors.bad_image hole, this service fallback: serve with errors.bad_image: hole"

    async def before(bench: Bench) -> None:
        await bench.worker("w0")
        opened = await bench.open("run")
        assert opened.decoder == "pil; errors.bad_image hole"
        await bench.one(opened.session, 0, done=0)

    async def other(bench: Bench) -> None:
        await bench.worker("w0")
        opened = await bench.open("run")
        with pytest.raises(ResumeRefused, match=f"run run has {words}"):
            await bench.steps(opened.session, 0, done=0)
        assert bench.planner.asked == []

    async def same(bench: Bench) -> None:
        await bench.worker("w0")
        opened = await bench.open("run")
        await bench.one(opened.session, 0, done=0)

    async def new_run(bench: Bench) -> None:
        await bench.worker("w0")
        opened = await bench.open("new")
        assert opened.decoder == "pil; errors.bad_image fallback"
        await bench.one(opened.session, 0, done=0)

    state = tmp_path / "state"
    on_bench(config, state, before)
    on_bench(under(config, "fallback"), state, other)
    on_bench(config, state, same)
    on_bench(under(config, "fallback"), state, new_run)


@pytest.mark.parametrize("saved", ["pil", "pil; errors.bad_image hole"])
def test_a_saved_state_is_not_resumed_under_another_policy(
    saved: str, config: Config, tmp_path: Path
) -> None:
    state = sealed(
        ResumeState(
            version=STATE_VERSION,
            job="test",
            plan_digest=DIGEST,
            decoder=saved,
            cursor=cursor_at(3, 6),
            micro_step=0,
            dp_size=1,
            micro_steps=1,
            packs_per_cell=1,
        )
    )

    async def refused(bench: Bench) -> None:
        await bench.worker("w0")
        with pytest.raises(ResumeRefused, match=r"state has errors\.bad_image hole, this"):
            await bench.open("run", state=state)

    async def goes_on(bench: Bench) -> None:
        await bench.worker("w0")
        assert (await bench.open("again", state=state)).first_step == 3

    on_bench(under(config, "fail"), tmp_path / "state", refused)
    on_bench(config, tmp_path / "state", goes_on)


def test_what_a_worker_was_given_since_it_last_told_is_suspect_too(
    config: Config, tmp_path: Path
) -> None:
    async def check(bench: Bench) -> None:
        await bench.worker("w0")
        session = (await bench.open("run", micro_steps=2)).session
        given = (await bench.pull("w0", session)).assignments
        await bench.worker("w1")
        await bench.lose("w0")
        moved = by_pack((await bench.pull("w1", session)).assignments)
        assert {a.pack_id for a in given} == {p for p, a in moved.items() if a.isolated}

    on_bench(config, tmp_path / "state", check)
