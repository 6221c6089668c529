"""The whole service without Ray: what is promised about delivery, resume, faults and fencing."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import Readers, read_ranks, two_streams
from support.local_service import LocalService

from dataservice.config import Config
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.errors import DeadlineExceeded, ImageError, ResumeRefused, SessionFenced
from dataservice.storage.index import Index
from trainer_client import PackStream, ParallelLayout

JOB = "test"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("service"))


@pytest.fixture
def config(base: Config, tmp_path: Path) -> Config:
    """The shared index, with state and cache of the test's own."""
    staging = dataclasses.replace(base.staging, cache_dir=str(tmp_path / "cache"))
    return dataclasses.replace(base, state_dir=str(tmp_path / "state"), staging=staging)


def planned_packs(config: Config, grid: Grid) -> dict[int, list[str]]:
    """Sorted pack ids by step, to the end of the data."""
    plan = Plan(config.plan, Index.open(config.index_dir))
    cursor, steps = plan.start(), {}
    while (step := plan.step(cursor, grid)) is not None:
        steps[step.step] = sorted(step.pack_id(i) for i in range(grid.num_packs))
        cursor = step.next_cursor
    return steps


@pytest.fixture(scope="module")
def undisturbed(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Readers:
    """Two ranks, four micro-steps, to the end of the data."""
    folder = tmp_path_factory.mktemp("undisturbed")
    staging = dataclasses.replace(base.staging, cache_dir=str(folder / "cache"))
    config = dataclasses.replace(base, state_dir=str(folder / "state"), staging=staging)
    with LocalService(config, workers=2) as service:
        return read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None)


def test_every_planned_pack_arrives_once(base: Config, undisturbed: Readers) -> None:
    expected = planned_packs(base, Grid(dp_size=2, micro_steps=4))
    assert len(expected) > 20
    assert undisturbed.packs_of_step() == expected
    cells = Counter((d.step, d.micro_step, d.dp_rank) for d in undisturbed.deliveries)
    assert set(cells.values()) == {1}
    loss = {d.step: set() for d in undisturbed.deliveries}
    for delivery in undisturbed.deliveries:
        loss[delivery.step].add(delivery.loss_tokens)
    assert all(len(values) == 1 for values in loss.values())


def test_shared_memory_and_grpc_bring_the_same_packs(config: Config, undisturbed: Readers) -> None:
    with LocalService(config, workers=2) as service:
        remote = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None, local=False
        )
    assert remote.local_packs == 0
    assert undisturbed.local_packs == len(undisturbed.deliveries) > 0
    assert undisturbed.digests_of_packs() == remote.digests_of_packs()


def test_a_lost_worker_costs_nothing_but_time(config: Config, undisturbed: Readers) -> None:
    with LocalService(config, workers=2) as service:
        first = next(iter(service.workers))
        seen = [0]

        def cut_once(_: Any) -> None:
            seen[0] += 1
            if seen[0] == 20:
                service.cut_worker(first)

        readers = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None, on_batch=cut_once
        )
        counters = service.status()["counters"]
    assert readers.digests_of_packs() == undisturbed.digests_of_packs()
    assert counters["workers_lost"] == 1
    assert counters["packs_rebuilt"] >= max(1, counters.get("packs_suspected", 0))


def test_resume_at_the_same_and_at_other_sizes(config: Config, undisturbed: Readers) -> None:
    whole = undisturbed.packs_of_step()
    with LocalService(config, workers=2) as service:
        start = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=5)
        state = start.states[0]
        assert start.states[1] == state
        assert start.packs_of_step() == {s: whole[s] for s in range(5)}
        same = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=4,
            micro_steps=2,
            steps=5,
            states=dict.fromkeys(range(4), state),
        )
        assert same.packs_of_step() == {s: whole[s] for s in range(5, 10)}
        other = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=3,
            micro_steps=2,
            steps=4,
            states=dict.fromkeys(range(3), state),
        )
    flat = [pack for step in range(5, 20) for pack in whole[step]]
    assert sorted(p for ids in other.packs_of_step().values() for p in ids) == sorted(flat[:24])


def test_resume_inside_a_step_needs_the_same_grid(config: Config, undisturbed: Readers) -> None:
    with LocalService(config) as service:
        start = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=2)
        inside: dict[int, dict[str, Any]] = {}
        run_id = "inside"

        def read(rank: int) -> None:
            with PackStream(
                service.endpoint,
                job=JOB,
                layout=ParallelLayout.data_parallel(rank, 2),
                micro_steps=4,
                run_id=run_id,
            ) as stream:
                for _ in range(10):
                    next(stream)
                inside[rank] = stream.state_dict()

        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert inside[0] == inside[1]
        with pytest.raises(ResumeRefused, match="micro-step 2"):
            read_ranks(
                service.endpoint,
                job=JOB,
                dp_size=4,
                micro_steps=2,
                steps=1,
                states=dict.fromkeys(range(4), inside[0]),
            )
        rest = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=2, states=inside
        )
    first = [d for d in rest.deliveries if d.step == 2]
    assert {(d.micro_step, d.dp_rank) for d in first} == {(2, 0), (2, 1), (3, 0), (3, 1)}
    expected = {
        (d.step, d.micro_step, d.dp_rank): d.digests
        for d in undisturbed.deliveries
        if d.step in (2, 3)
    }
    for delivery in rest.deliveries[:12]:
        place = (delivery.step, delivery.micro_step, delivery.dp_rank)
        if place in expected:
            assert delivery.digests == expected[place]
    assert start.packs_of_step().keys() == {0, 1}


def test_a_state_of_another_plan_is_refused_with_both_digests(
    config: Config, undisturbed: Readers
) -> None:
    state = undisturbed.states[0]
    other = dataclasses.replace(config, plan=dataclasses.replace(config.plan, seed=7))
    with LocalService(other) as service:
        digest = service.status()["plan_digest"]
        with pytest.raises(ResumeRefused) as refused:
            read_ranks(
                service.endpoint,
                job=JOB,
                dp_size=2,
                micro_steps=4,
                steps=1,
                states=dict.fromkeys(range(2), state),
            )
    text = str(refused.value)
    assert digest in text and state["plan_digest"] in text and "new run" in text


def test_ranks_with_different_states_are_all_refused(config: Config) -> None:
    with LocalService(config) as service:
        start = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=1, steps=1)
        more = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=1, steps=1, states=start.states
        )
        with pytest.raises(ResumeRefused, match="same checkpoint"):
            read_ranks(
                service.endpoint,
                job=JOB,
                dp_size=2,
                micro_steps=1,
                steps=1,
                states={0: start.states[0], 1: more.states[1]},
            )


def test_a_newer_run_fences_the_older(config: Config) -> None:
    with LocalService(config) as service:
        options: dict[str, Any] = {"job": JOB, "layout": ParallelLayout(), "micro_steps": 1}
        old = PackStream(service.endpoint, run_id="old", prefetch_packs=1, **options)
        next(old)
        with PackStream(service.endpoint, run_id="new", **options) as new:
            next(new)
            with pytest.raises(SessionFenced, match="is over"):
                for _ in range(20):
                    next(old)
            old.close()
            with (
                pytest.raises(SessionFenced),
                PackStream(service.endpoint, run_id="old", **options) as again,
            ):
                next(again)
            next(new)


def test_missing_ranks_are_named(config: Config) -> None:
    with (
        LocalService(config) as service,
        PackStream(
            service.endpoint,
            job=JOB,
            layout=ParallelLayout.data_parallel(1, 3),
            micro_steps=1,
            run_id="lonely",
            timeout_s=1.5,
        ) as stream,
        pytest.raises(DeadlineExceeded, match=r"0.*2"),
    ):
        next(stream)


def test_the_end_of_the_data_is_the_same_for_all_and_resumes_to_nothing(
    config: Config, undisturbed: Readers
) -> None:
    last = {
        rank: max(d.step for d in undisturbed.deliveries if d.dp_rank == rank) for rank in (0, 1)
    }
    assert last[0] == last[1]
    with LocalService(config) as service:
        rest = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=2,
            micro_steps=4,
            steps=None,
            states=undisturbed.states,
        )
    assert rest.deliveries == []


def test_the_hole_of_the_demo_data_is_journalled_once_and_replayed(
    config: Config, undisturbed: Readers
) -> None:
    holes = [hole for d in undisturbed.deliveries for hole in d.holes]
    assert len(holes) == 1 and "caption/" in holes[0]
    with LocalService(config) as service:
        read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None)
        status = service.status()
    assert status["holes"] == 1
    quarantine = Path(status["quarantine"])
    (told,) = quarantine.read_text().splitlines()
    place = json.loads(told)
    key, reason = f"{place['sample']}#{place['image']}", place["reason"]
    assert holes == [f"{key}: {reason} ({place['member']} in {place['source']}/{place['archive']})"]
    quarantine.unlink()
    with LocalService(config) as service:
        assert service.status()["holes"] == 1
        again = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None)
        assert service.status()["counters"].get("holes", 0) == 0
    assert again.digests_of_packs() == undisturbed.digests_of_packs()
    assert quarantine.read_text() == told + "\n"


def with_policy(config: Config, policy: Any) -> Config:
    return dataclasses.replace(config, errors=dataclasses.replace(config.errors, bad_image=policy))


def test_a_fallback_changes_the_pack_of_the_bad_picture_alone(
    config: Config, undisturbed: Readers
) -> None:
    with LocalService(with_policy(config, "fallback"), workers=2) as service:
        readers = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None)
        status = service.status()
    (hole,) = [hole for d in undisturbed.deliveries for hole in d.holes]
    (fallback,) = [hole for d in readers.deliveries for hole in d.holes]
    key, _, reason = hole.partition(": ")
    assert fallback == f"{key}: fallback: {reason}"
    assert status["holes"] == 1
    assert readers.packs_of_step() == undisturbed.packs_of_step()
    found, expected = readers.digests_of_packs(), undisturbed.digests_of_packs()
    changed = {place for place in expected if found[place] != expected[place]}
    holed = {(d.step, pack) for d in readers.deliveries if d.holes for pack in d.pack_ids}
    assert changed == holed and len(changed) == 1
    with (
        LocalService(config) as service,
        pytest.raises(ResumeRefused, match=r"errors\.bad_image fallback, this service hole"),
    ):
        read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=2,
            micro_steps=4,
            steps=1,
            states=readers.states,
        )


def test_where_no_hole_is_allowed_the_trainers_are_told_which_picture(
    config: Config, undisturbed: Readers
) -> None:
    (hole,) = [hole for d in undisturbed.deliveries for hole in d.holes]
    with LocalService(with_policy(config, "fail"), workers=2) as service:
        with pytest.raises(ImageError) as failed:
            read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None)
        assert service.status()["state"] == "failed"
    error = failed.value
    assert error.source == "caption" and error.member and error.reason.startswith("truncated JPEG")
    assert hole.startswith(f"{error.sample}#0: ")


def test_a_restarted_coordinator_goes_on_without_restarting_trainers(
    config: Config, undisturbed: Readers
) -> None:
    with LocalService(config, workers=2) as service:
        restarted = threading.Event()

        def restart() -> None:
            time.sleep(1.0)
            service.stop_coordinator()
            time.sleep(0.5)
            service.start_coordinator()
            restarted.set()

        thread = threading.Thread(target=restart)
        thread.start()
        readers = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=None, pause_s=0.02
        )
        thread.join()
        assert restarted.is_set()
    assert readers.digests_of_packs() == undisturbed.digests_of_packs()
    assert readers.packs_of_step() == undisturbed.packs_of_step()


def test_a_paused_client_holds_its_bound_and_resumes_at_once(config: Config) -> None:
    workers = dataclasses.replace(config.workers, ready_bytes=6 << 20)
    config = dataclasses.replace(config, workers=workers)
    with LocalService(config) as service:
        pair = two_streams(service.endpoint, job=JOB, prefetch_packs=2, timeout_s=4.0)
        with pair as (paused, other):
            next(paused)
            got = 0
            with pytest.raises(DeadlineExceeded, match="rank 0 is at step 0"):
                while True:
                    next(other)
                    got += 1
            ahead = config.serving.plan_ahead_steps
            assert got == ahead * 4
            ready = [worker["ready_bytes"] for worker in service.status()["workers"]]
            time.sleep(1.0)
            assert [w["ready_bytes"] for w in service.status()["workers"]] == ready
            assert sum(ready) <= workers.ready_bytes
            begin = time.monotonic()
            next(paused)
            assert time.monotonic() - begin < 0.5
