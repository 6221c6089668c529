"""A run that leaves samples and steps out: what its ranks get, and how it may go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_settings, write_config
from support.harness import Delivery, Readers, read_ranks
from support.local_service import LocalService

from dataservice.actors.state_log import STEPS_A_RECORD
from dataservice.config import Config, load_config
from dataservice.core.exclusions import EXCLUDED, ExcludedSample, SkippedSteps, exclusions
from dataservice.errors import ConfigError, ResumeRefused
from dataservice.indexing import update_index
from trainer_client import PackStream, ParallelLayout

JOB = "test"
STEPS = 9
SAVED_AT = 3
SKIP = SkippedSteps(start=5, stop=7)


def config_of(folder: Path) -> Config:
    """Undamaged data; no hole is allowed."""
    settings = demo_settings(
        folder,
        plan={"pack_length": 2048, "lanes": 2, "window": 25},
        staging={"cache_dir": None},
        errors={"bad_image": "fail", "max_hole_share": 0.0, "max_holes_in_a_row": 0},
    )
    settings["sources"] = [s for s in settings["sources"] if s["name"] != "caption"]
    settings["sources"][0]["take"] = "first:40"
    return load_config(str(write_config(folder, settings)))


@dataclasses.dataclass
class Base:
    config: Config
    whole: Readers
    """STEPS steps, nothing left out."""
    state: dict[int, dict[str, Any]]
    """After SAVED_AT steps."""
    sample: str
    """With pictures, of a step between SAVED_AT and SKIP."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    config = config_of(tmp_path_factory.mktemp("job"))
    Path(config.index_dir).mkdir()
    update_index(config)
    with LocalService(config) as service:
        first = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=SAVED_AT)
        whole = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=2,
            micro_steps=2,
            steps=STEPS - SAVED_AT,
            states=first.states,
        )
    whole.deliveries[:0] = first.deliveries
    sample = next(
        key
        for d in whole.deliveries
        if SAVED_AT <= d.step < SKIP.start
        for pack in d.sample_keys
        for key in pack
        if key.startswith("multi/")
    )
    return Base(config=config, whole=whole, state=first.states, sample=sample)


def leaving_out(
    base: Base, folder: Path, from_step: int | None = SAVED_AT, *skips: SkippedSteps
) -> Config:
    samples = [] if from_step is None else [ExcludedSample(key=base.sample, from_step=from_step)]
    return dataclasses.replace(
        base.config, state_dir=str(folder / "state"), exclude=exclusions(samples, skips)
    )


def read(config: Config, steps: int, **more: Any) -> tuple[Readers, dict[str, Any]]:
    with LocalService(config) as service:
        readers = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=steps, **more
        )
        return readers, service.status()


def packs_in(deliveries: list[Delivery], step: int) -> dict[str, tuple[Any, ...]]:
    """Pack id -> digest, number and sample keys."""
    return {
        pack: (d.digests[i], d.numbers[i], d.sample_keys[i])
        for d in deliveries
        if d.step == step
        for i, pack in enumerate(d.pack_ids)
    }


def planned_step(step: int) -> int:
    """Whose packs come as a step of the run with SKIP."""
    return step if step < SKIP.start else step + SKIP.stop - SKIP.start


@pytest.fixture(scope="module")
def excluded(
    base: Base, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Readers, dict[str, Any], dict[tuple[str, ...], Any]]:
    """Resumed at SAVED_AT with the sample and SKIP left out from there on."""
    config = leaving_out(base, tmp_path_factory.mktemp("excluded"), SAVED_AT, SKIP)
    batches: dict[tuple[str, ...], Any] = {}
    steps = STEPS - SAVED_AT - (SKIP.stop - SKIP.start)
    readers, status = read(
        config,
        steps,
        states=base.state,
        on_batch=lambda batch: batches.setdefault(tuple(batch.meta["pack_ids"]), batch),
    )
    return config, readers, status, batches


def test_only_packs_with_the_sample_change_and_only_in_pixels_and_loss(
    base: Base, excluded: Any
) -> None:
    _, readers, status, batches = excluded
    steps = sorted({d.step for d in readers.deliveries})
    assert steps == list(range(SAVED_AT, SAVED_AT + len(steps)))
    changed = []
    for step in steps:
        before = packs_in(base.whole.deliveries, planned_step(step))
        after = packs_in(readers.deliveries, step)
        assert {p: v[1:] for p, v in before.items()} == {p: v[1:] for p, v in after.items()}
        changed += [pack for pack in before if before[pack] != after[pack]]
        assert {p for p in before if base.sample in before[p][2]} >= {
            p for p in before if before[p] != after[p]
        }
    assert len(changed) == 1
    batch = batches[changed[0],]
    (keys,) = batch.meta["sample_keys"]
    bounds, number = batch["cu_seqlens"].tolist(), keys.index(base.sample)
    place = slice(bounds[number], bounds[number + 1])
    assert (batch["labels"][place] == -100).all()
    assert (batch["labels"] != -100).any()
    assert any(EXCLUDED in hole and base.sample in hole for hole in batch.meta["holes"])
    rows = batch["image_grid_thw"].prod(dim=1).tolist()
    mine = (batch["image_doc_ids"] == number).tolist()
    pixels = batch["pixel_values"].split(rows)
    assert any(mine)
    assert all(bool(one.any()) != is_mine for one, is_mine in zip(pixels, mine, strict=True))
    losses = {(d.step, d.loss_tokens) for d in readers.deliveries if d.step < SKIP.start} - {
        (d.step, d.loss_tokens) for d in base.whole.deliveries
    }
    assert losses == set()  # planned ones stay

    assert status["state"] == "serving" and status["holes"] == 0
    assert status["counters"]["steps_skipped"] == 2
    assert status["counters"]["samples_excluded"] == 1
    assert status["session"]["excluded"].startswith("1 sample, steps 5:7 (")


def test_a_state_goes_on_with_the_same_exclusions_and_is_refused_without(
    base: Base, excluded: Any, tmp_path: Path
) -> None:
    config, readers, _, _ = excluded
    own = dataclasses.replace(config, state_dir=str(tmp_path / "same"))
    went_on, _ = read(own, 1, states=readers.states)
    assert packs_in(went_on.deliveries, STEPS - 2)
    assert readers.states[0]["plan_digest"] == base.state[0]["plan_digest"]
    for other, now in (
        (leaving_out(base, tmp_path / "none", None), "nothing"),
        (leaving_out(base, tmp_path / "less", SAVED_AT), r"1 sample \("),
        (leaving_out(base, tmp_path / "later", SAVED_AT + 1, SKIP), r"1 sample, steps 5:7 \("),
    ):
        words = (
            rf"has excluded 1 sample, steps 5:7 \(\w+\) before step {STEPS - 2}, this service {now}"
        )
        with pytest.raises(ResumeRefused, match=f"{words}.*serve with the `exclude`") as refused:
            read(other, 1, states=readers.states)
        assert "resume from a state of an earlier step" in str(refused.value)
    more = leaving_out(base, tmp_path / "more", SAVED_AT, SKIP, SkippedSteps(start=STEPS, stop=10))
    read(more, 1, states=readers.states)
    early = leaving_out(base, tmp_path / "early", SAVED_AT - 1)
    with pytest.raises(
        ResumeRefused, match=r"has excluded nothing before step 3, this service 1 s"
    ):
        read(early, 1, states=base.state)


def test_inside_a_step_what_it_was_begun_with_counts(base: Base, tmp_path: Path) -> None:
    config = leaving_out(base, tmp_path / "on", 0)
    state: dict[str, Any] = {}
    layout = ParallelLayout.data_parallel(0, 1)

    def stream(service: LocalService) -> PackStream:
        return PackStream(service.endpoint, job=JOB, layout=layout, micro_steps=2, timeout_s=60)

    with LocalService(config) as service, stream(service) as one:
        next(one)
        state = one.state_dict()
    assert state["micro_step"] == 1 and state["cursor"]["excluded"].startswith("1 sample")
    other = leaving_out(base, tmp_path / "off", None)
    with LocalService(other) as service, stream(service) as one:
        one.load_state_dict(state)
        with pytest.raises(ResumeRefused, match=r"excluded 1 sample .* before step 1, .* nothing"):
            next(one)
    own = dataclasses.replace(config, state_dir=str(tmp_path / "again"))
    with LocalService(own) as service, stream(service) as one:
        one.load_state_dict(state)
        assert next(one).micro_step == 1


def test_a_restarted_coordinator_may_exclude_what_nobody_was_given_yet(
    base: Base, tmp_path: Path
) -> None:
    layout = ParallelLayout.data_parallel(0, 1)
    config = leaving_out(base, tmp_path, None)
    with LocalService(config) as service:
        with PackStream(
            service.endpoint, job=JOB, layout=layout, micro_steps=1, timeout_s=60
        ) as stream:
            next(stream)
            service.stop_coordinator()
            service.config = leaving_out(base, tmp_path, STEPS_A_RECORD)
            service.start_coordinator()
            for step in range(1, STEPS_A_RECORD):
                assert next(stream).step == step
            while base.sample in next(stream).meta["sample_keys"][0]:
                pass
            service.stop_coordinator()
            service.config = leaving_out(base, tmp_path, STEPS_A_RECORD - 1)
            service.start_coordinator()
            with pytest.raises(ResumeRefused, match=r"restart the trainers from a checkpoint"):
                while True:
                    next(stream)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("nothing/a.jsonl@0", "the source is none of multi, text"),
        ("multi/a.jsonl@0", "source multi has no record file of this name"),
        ("multi/multi-00000.jsonl@1", "no record of the file begins there"),
    ],
)
def test_a_sample_that_is_not_there_is_named(
    base: Base, tmp_path: Path, key: str, words: str
) -> None:
    wrong = exclusions([ExcludedSample(key=key, from_step=0)], ())
    config = dataclasses.replace(base.config, state_dir=str(tmp_path), exclude=wrong)
    from dataservice.actors.planner import Planner

    with pytest.raises(ConfigError, match=f"exclude: sample {key}: {words}"):
        Planner(config)


def test_the_journal_of_another_job_is_left_alone(base: Base, tmp_path: Path) -> None:
    from dataservice.actors.state_log import StateLog

    path = str(tmp_path / "journal")
    log = StateLog(path)
    log.start_epoch("a" * 64, "one")
    log.close()
    log = StateLog(path)
    with pytest.raises(ConfigError, match=r"holds the journal of job 'one', this is job 'two': g"):
        log.start_epoch("b" * 64, "two")
    log.close()
    log = StateLog(path)
    assert (log.job, log.digest) == ("one", "a" * 64)
    log.close()
