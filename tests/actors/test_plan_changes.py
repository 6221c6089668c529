"""The running service over plans with phases, segregated kinds and settings that changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import Readers, read_ranks
from support.local_service import LocalService

from dataservice.config import Config
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, KindShare, Phase, Segregation, SourceShare
from dataservice.errors import ResumeRefused
from dataservice.storage.index import Index
from trainer_client import PackStream, ParallelLayout

JOB = "test"
GRID = Grid(dp_size=2, micro_steps=4)
EVEN = tuple(SourceShare(name=n, weight="1") for n in ("text", "caption", "multi"))
PICTURES = (("caption", "3"), ("multi", "1"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("service"))


def planned_by(base: Config, folder: Path, **changes: Any) -> Config:
    """The shared index, with a plan and state of the test's own."""
    staging = dataclasses.replace(base.staging, cache_dir=str(folder / "cache"))
    plan = dataclasses.replace(base.plan, **changes)
    state_dir = str(folder / "state")
    return dataclasses.replace(base, state_dir=state_dir, staging=staging, plan=plan)


def read(config: Config, steps: int | None, **options: Any) -> Readers:
    with LocalService(config, workers=1) as service:
        return read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=4, steps=steps, **options
        )


def plan_of(config: Config) -> Plan:
    return Plan(config.plan, Index.open(config.index_dir))


def planned_packs(plan: Plan, first: int, stop: int) -> dict[int, list[str]]:
    cursor, steps = plan.skip(plan.start(), GRID, first), {}
    for number in range(first, stop):
        step = plan.step(cursor, GRID)
        assert step is not None
        steps[number] = sorted(step.pack_id(i) for i in range(step.num_packs))
        cursor = step.next_cursor
    return steps


class Announced:
    """What batches said of their own step, and of the step behind it, as if it had come."""

    def __init__(self) -> None:
        self.own: dict[int, dict[str, Any]] = {}
        self.next: dict[int, dict[str, Any] | None] = {}

    def note(self, batch: Any) -> None:
        meta = batch.meta
        own = self.own.setdefault(batch.step, {"num_packs": [0] * GRID.micro_steps})
        own |= {name: meta[name] for name in ("pack_length", "max_pixels")}
        own["num_packs"][batch.micro_step] = meta["num_packs"]
        assert meta["num_packs"] * meta["pack_length"] == len(batch["input_ids"])
        assert self.next.setdefault(batch.step + 1, meta["next_step"]) == meta["next_step"]

    def check(self, *, to_the_end: bool) -> None:
        first, *later = sorted(self.own)
        assert later == list(range(first + 1, first + 1 + len(later)))
        assert [self.next[step] for step in later] == [self.own[step] for step in later]
        assert (self.next[later[-1] + 1] is None) == to_the_end


def test_phases_change_pack_length_and_pictures(base: Config, tmp_path: Path) -> None:
    phases = (Phase(windows=2, pack_length=1024, max_pixels=28 * 28 * 16), Phase())
    config = planned_by(base, tmp_path, phases=phases)
    plan = plan_of(config)
    lengths: dict[int, set[int]] = {}
    announced = Announced()

    def note(batch: Any) -> None:
        announced.note(batch)
        lengths.setdefault(batch.step, set()).add(len(batch["input_ids"]))
        tokens = (batch["image_grid_thw"].prod(dim=1) // 4).tolist()
        if len(batch["input_ids"]) == 1024:
            assert max(tokens, default=0) <= 16

    readers = read(config, None, on_batch=note)
    assert readers.packs_of_step() == planned_packs(plan, 0, len(lengths))
    announced.check(to_the_end=True)
    limits = {own["pack_length"]: own["max_pixels"] for own in announced.own.values()}
    assert limits == {1024: 28 * 28 * 16, 2048: 50176}
    order = [lengths[step] for step in sorted(lengths)]
    change = order.index({2048})
    assert 0 < change < len(order)
    assert order == [{1024}] * change + [{2048}] * (len(order) - change)


def test_segregated_kinds_come_in_micro_steps_of_their_own(base: Config, tmp_path: Path) -> None:
    segregate = Segregation(
        text=KindShare(micro_steps=1, packs_per_cell=2), vision=KindShare(micro_steps=3)
    )
    config = planned_by(base, tmp_path, segregate=segregate, sources=EVEN, epochs=None)
    seen: list[tuple[int, int, bool]] = []
    announced = Announced()

    def note(batch: Any) -> None:
        announced.note(batch)
        has_images = len(batch["image_grid_thw"]) > 0
        seen.append((batch.micro_step, len(batch["input_ids"]), has_images))

    readers = read(config, 3, on_batch=note)
    announced.check(to_the_end=False)
    assert announced.own[0]["num_packs"] == [2, 1, 1, 1]
    assert {(m, n) for m, n, _ in seen} == {(0, 4096), (1, 2048), (2, 2048), (3, 2048)}
    assert all(has_images == (micro_step > 0) for micro_step, _, has_images in seen)
    assert readers.packs_of_step() == planned_packs(plan_of(config), 0, 3)
    numbers = [n for d in readers.deliveries for n in d.numbers]
    assert sorted(numbers) == list(range(3 * 10))

    resumed = read(config, 2, states=readers.states)
    assert resumed.packs_of_step() == planned_packs(plan_of(config), 3, 5)

    other = Grid(dp_size=2, micro_steps=6)
    with (
        LocalService(config, workers=1) as service,
        pytest.raises(Exception, match="multiple of 4"),
    ):
        read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=other.micro_steps, steps=1)


@pytest.mark.parametrize("boundary", ["drain", "cut"])
def test_new_weights_are_a_new_phase_of_a_run_that_goes_on(
    base: Config, tmp_path: Path, boundary: str
) -> None:
    old = planned_by(base, tmp_path, sources=EVEN, epochs=None, lanes=2, window=40)
    first = read(old, 3)
    changed = dataclasses.replace(
        old, plan=dataclasses.replace(old.plan, phases=(Phase(weights=PICTURES),))
    )
    with pytest.raises(ResumeRefused, match="put a phase with the new settings") as refused:
        read(changed, 1, states=first.states)
    cursor = first.states[0]["cursor"]
    windows = max(window + (offset > 0) for window, offset in cursor["lanes"])
    packs = 24 if boundary == "cut" else None
    assert f"`windows: {windows}` (with `packs: 24`" in str(refused.value)

    phases = (Phase(windows=windows, packs=packs), Phase(weights=PICTURES))
    config = dataclasses.replace(old, plan=dataclasses.replace(old.plan, phases=phases))
    plan = plan_of(config)
    went_on = read(config, 8, states=first.states)
    assert went_on.packs_of_step() == planned_packs(plan, 3, 11)
    keys = [(d.step, key) for d in went_on.deliveries for pack in d.sample_keys for key in pack]
    text_until = max((step for step, key in keys if key.startswith("text/")), default=-1)
    assert (text_until < 3) if boundary == "cut" else (3 <= text_until < 10)
    later = plan.step(plan.skip(plan.start(), GRID, 3), GRID)
    assert later is not None
    assert (later.given_up.sum() > 0) == (boundary == "cut")


def test_a_plan_cannot_change_inside_a_step(base: Config, tmp_path: Path) -> None:
    old = planned_by(base, tmp_path, sources=EVEN, epochs=None, lanes=2, window=40)
    with (
        LocalService(old, workers=1) as service,
        PackStream(
            service.endpoint, job=JOB, layout=ParallelLayout.data_parallel(0, 1), micro_steps=4
        ) as stream,
    ):
        next(stream)
        state = stream.state_dict()
    phases = (Phase(windows=2), Phase(weights=PICTURES))
    config = dataclasses.replace(old, plan=dataclasses.replace(old.plan, phases=phases))
    with (
        LocalService(config, workers=1) as service,
        PackStream(
            service.endpoint, job=JOB, layout=ParallelLayout.data_parallel(0, 1), micro_steps=4
        ) as stream,
    ):
        stream.load_state_dict(state)
        with pytest.raises(ResumeRefused, match="saved inside step 0"):
            next(stream)
