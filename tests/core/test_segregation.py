from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.plan import Plan
from dataservice.core.plan.check import kind_grids
from dataservice.core.settings import Grid, KindShare, Phase, PlanSettings, Segregation, SourceShare
from dataservice.core.tables import StepPlan
from dataservice.errors import ConfigError, ResumeRefused
from tests.core.planning import (
    INDEX,
    counted,
    endless_plan,
    items_in,
    lost_in,
    make_plan,
    pack_ids,
    same,
    steps_of,
    windows_of,
)
from tests.core.synthetic import SyntheticIndex, SyntheticSource

Weights = tuple[tuple[str, str], ...]


def shares(
    text: int,
    vision: int,
    per_text: int = 1,
    per_vision: int = 1,
    *,
    weights: tuple[Weights | None, Weights | None] = (None, None),
) -> Segregation:
    return Segregation(
        text=KindShare(micro_steps=text, packs_per_cell=per_text, weights=weights[0]),
        vision=KindShare(micro_steps=vision, packs_per_cell=per_vision, weights=weights[1]),
    )


GRID = Grid(dp_size=2, micro_steps=6)


def finite(segregate: Segregation, **changes: Any) -> Plan:
    return make_plan(segregate=segregate, **{"lanes": 3, "window": 30, **changes})


def endless(segregate: Segregation, **changes: Any) -> Plan:
    return endless_plan(segregate=segregate, **{"lanes": 3, "window": 30, **changes})


def of_kinds(plan: Plan, step: StepPlan) -> list[Any]:
    """Masks of the text and the vision packs of a step, padding with the kind it pads."""
    sizes = [grid.num_packs for grid in kind_grids(plan.settings, step.grid)]
    place = np.arange(step.num_packs)
    return [place < sizes[0], place >= sizes[0]]


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_the_phase_of_a_step_is_known_without_placing_it(remainder: str) -> None:
    phases = (
        Phase(windows=1, vision_windows=2),
        Phase(windows=2, vision_windows=1, pack_length=1024),
        Phase(),
    )
    plan = finite(shares(1, 2, 2, 1), phases=phases, remainder=remainder)
    grid = Grid(dp_size=1, micro_steps=3)
    steps = list(steps_of(plan, grid))
    behind = [plan.phase_of_step(step.next_cursor, grid) for step in steps]
    assert behind == [*(step.phase for step in steps[1:]), None]
    assert steps[0].phase < steps[-1].phase == 2


# ---- kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [("1", "1", "1"), ("2", "1/2", "3")])
def test_every_sample_is_in_a_window_of_its_kind(repeat: tuple[str, ...]) -> None:
    sources = tuple(
        SourceShare(name=s.name, repeat=r) for s, r in zip(INDEX.sources, repeat, strict=True)
    )
    plan = finite(shares(1, 1), sources=sources, epochs=2)
    text, vision = plan.streams
    assert (text.mixture.kind, vision.mixture.kind) == ("text", "vision")
    assert plan.num_lanes == text.num_lanes + vision.num_lanes == 6
    read: Counter[tuple[int, int]] = Counter()
    for window in windows_of(plan):
        begin = window.start == 0
        read.update(zip(window.source[begin].tolist(), window.row[begin].tolist(), strict=True))
        for source in set(window.source.tolist()):
            rows = window.row[window.source == source]
            images = np.diff(INDEX.columns(source, rows).image_offsets)
            assert ((images == 0) == (window.lane < 3)).all()
    dropped = counted(plan, "dropped_long")
    for number, (stats, times) in enumerate(zip(INDEX.sources, repeat, strict=True)):
        found = sum(count for (of, _), count in read.items() if of == number)
        each = {"1": 2, "2": 4, "1/2": 1, "3": 6}[times]
        assert found + dropped[number] == each * sum(stats.shard_samples)
        assert max(count for (of, _), count in read.items() if of == number) == each


def test_a_source_of_one_kind_is_in_one_stream() -> None:
    plan = finite(shares(1, 1))
    names = [
        [INDEX.sources[source.number].name for source in stream.mixture.phases[0].sources]
        for stream in plan.streams
    ]
    assert names == [["multi", "text"], ["caption", "multi"]]


@pytest.mark.parametrize(
    ("kind", "match"), [("text", "usable sample with images"), ("caption", "without images")]
)
def test_no_sample_of_a_kind(kind: str, match: str) -> None:
    index = SyntheticIndex([SyntheticSource(name="only", num_samples=50, kind=kind)])
    with pytest.raises(ConfigError, match=match):
        make_plan(index, segregate=shares(1, 1))


def test_no_sample_of_a_kind_in_a_later_phase() -> None:
    with pytest.raises(ConfigError, match=r"phases\[1\]: no source .* usable sample with images"):
        endless(shares(1, 1), phases=(Phase(packs=9), Phase(weights=(("text", "1"),))))


def test_weights_by_kind() -> None:
    weights = ((("text", "1"),), (("caption", "1"), ("multi", "3")))
    plan = endless(shares(1, 1, weights=weights))
    text, vision = (stream.mixture.phases[0].sources for stream in plan.streams)
    assert [source.number for source in text] == [0]
    assert [(s.number, str(s.share)) for s in vision] == [(1, "1/4"), (2, "3/4")]


# ---- steps --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=12)
@given(
    text=st.integers(1, 3),
    vision=st.integers(1, 3),
    per_text=st.integers(1, 3),
    per_vision=st.integers(1, 2),
    times=st.integers(1, 2),
    dp_size=st.integers(1, 3),
    per_cell=st.integers(1, 2),
    remainder=st.sampled_from(["pad", "drop"]),
)
def test_every_global_batch_has_the_configured_mix(
    text: int,
    vision: int,
    per_text: int,
    per_vision: int,
    times: int,
    dp_size: int,
    per_cell: int,
    remainder: str,
) -> None:
    plan = finite(shares(text, vision, per_text, per_vision), remainder=remainder)
    grid = Grid(dp_size=dp_size, micro_steps=(text + vision) * times, packs_per_cell=per_cell)
    numbers: list[int] = []
    ended = [False, False]
    delivered: list[str] = []
    for step in steps_of(plan, grid):
        kinds = of_kinds(plan, step)
        packs = [dp_size * per_cell * times * n for n in (text * per_text, vision * per_vision)]
        assert [int(kind.sum()) for kind in kinds] == packs
        for which, (kind, lanes) in enumerate(zip(kinds, (range(3), range(3, 6)), strict=True)):
            lane = step.lane[kind]
            assert set(lane.tolist()) <= {-1, *lanes}
            assert not ended[which] or (lane < 0).all()
            ended[which] |= bool((lane < 0).any())
        assert not any(ended) or remainder == "pad"
        boundary = text * times
        assert set(step.micro_step[kinds[0]].tolist()) == set(range(boundary))
        assert set(step.micro_step[kinds[1]].tolist()) == set(range(boundary, grid.micro_steps))
        cells = Counter(zip(step.micro_step.tolist(), step.dp_rank.tolist(), strict=True))
        for (micro_step, _), count in cells.items():
            assert count == (per_text if micro_step < boundary else per_vision) * per_cell
        assert len(cells) == dp_size * grid.micro_steps
        numbers += step.pack_number[step.lane >= 0].tolist()
        assert step.next_cursor.num_packs == len(numbers)
        delivered += pack_ids(step)
    assert numbers == list(range(len(numbers)))
    every = {f"{w.lane}.{w.window}.{k}" for w in windows_of(plan) for k in range(w.num_packs)}
    assert len(set(delivered)) == len(delivered)
    assert set(delivered) <= every
    assert remainder == "drop" or set(delivered) == every


def test_same_packs_for_grids_of_one_size() -> None:
    plan = finite(shares(2, 1, 1, 2))
    grids = [
        Grid(dp_size=4, micro_steps=3),
        Grid(dp_size=2, micro_steps=6),
        Grid(dp_size=1, micro_steps=12),
        Grid(dp_size=2, micro_steps=3, packs_per_cell=2),
    ]
    runs = [list(steps_of(plan, grid)) for grid in grids]
    for run in runs[1:]:
        assert [pack_ids(step) for step in run] == [pack_ids(step) for step in runs[0]]
        assert [step.next_cursor for step in run] == [step.next_cursor for step in runs[0]]


@pytest.mark.parametrize("micro_steps", [1, 2, 4, 7])
def test_micro_steps_that_cannot_be_divided(micro_steps: int) -> None:
    plan = finite(shares(4, 2))
    with pytest.raises(ConfigError, match=f"micro_steps is {micro_steps}.*multiple of 3"):
        plan.step(plan.start(), Grid(dp_size=2, micro_steps=micro_steps))


def test_homes_of_both_kinds() -> None:
    plan = finite(shares(1, 1))
    homes = [0, 1, 0, 1, 0, 1]
    step = plan.step(plan.start(), Grid(dp_size=4, micro_steps=4), homes, ranks_per_node=2)
    assert step is not None
    assert step.home.tolist() == [homes[lane] for lane in step.lane]
    with pytest.raises(ValueError, match="3 lanes; the plan has 6"):
        plan.step(plan.start(), GRID, homes[:3])


def test_drop_ends_when_a_kind_cannot_fill_its_share() -> None:
    plan = finite(shares(1, 1), remainder="drop")
    steps = list(steps_of(plan, GRID))
    lost = lost_in(plan, items_in(plan, steps))
    rest = plan.left_over(steps[-1].next_cursor)
    assert [rest.get(name, 0) for name in ("text", "caption", "multi")] == lost
    assert sum(lost) > 0


# ---- phases and resume --------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_phases_change_on_a_step_for_both_kinds(remainder: str) -> None:
    plan = endless(
        shares(2, 1),
        phases=(Phase(packs=90), Phase(packs=60, pack_length=4096), Phase()),
        remainder=remainder,
    )
    steps = [step for step, _ in zip(steps_of(plan, GRID), range(40), strict=False)]
    assert {step.phase for step in steps} == {0, 1, 2}
    for step in steps:
        real = np.flatnonzero(step.lane >= 0).tolist()
        found = {plan.window(int(step.lane[i]), int(step.window[i])).pack_length for i in real}
        assert found == {step.pack_length}
        assert remainder == "pad" or len(real) == step.num_packs
    for a, b in itertools.pairwise(steps):
        if a.phase != b.phase:
            for kind in of_kinds(plan, b):
                lanes = set(b.lane[kind].tolist())
                assert lanes and (b.number[kind] >= 0).all()


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_resume_at_every_boundary(remainder: str) -> None:
    def plan() -> Plan:
        return finite(
            shares(2, 1, 1, 2),
            phases=(Phase(packs=40), Phase(pack_length=4096)),
            remainder=remainder,
            epochs=2,
        )

    straight = list(steps_of(plan(), GRID))
    fresh = plan()
    for step in straight:
        again = fresh.step(step.cursor, GRID)
        assert again is not None
        assert same(again, step)
    assert fresh.step(straight[-1].next_cursor, GRID) is None
    assert {step.phase for step in straight} == {0, 1}


def test_cursors_of_plans_with_other_streams_are_refused() -> None:
    apart, together = endless(shares(1, 1)), endless_plan(lanes=6, window=30)
    for plan, other in ((apart, together), (together, apart)):
        with pytest.raises(ResumeRefused, match="plan that wrote the cursor"):
            plan.step(other.start(), GRID)


def test_windows_of_phases_are_given_by_kind() -> None:
    with pytest.raises(ConfigError, match="takes both or neither"):
        endless(shares(1, 1), phases=(Phase(windows=3), Phase()))
    with pytest.raises(ConfigError, match="takes both or neither"):
        endless_plan(phases=(Phase(packs=30, vision_windows=3), Phase()))


def test_a_cut_gives_up_what_both_kinds_hold() -> None:
    before = endless(shares(1, 2))
    cursor = before.skip(before.start(), GRID, 3)
    windows = [
        max(w + (offset > 0) for w, offset in cursor.lanes[stream : stream + 3])
        for stream in (0, 3)
    ]
    cut = Phase(windows=windows[0], vision_windows=windows[1], packs=cursor.num_packs)
    plan = endless(shares(1, 2), phases=(cut, Phase(pack_length=4096)))
    assert plan.phase_digests[0] == before.phase_digests[0]
    assert plan.skip(plan.start(), GRID, 3) == cursor
    step = plan.step(cursor, GRID)
    assert step is not None
    assert step.pack_length == 4096
    assert step.pack_number.tolist() == list(range(36, 48))
    assert step.given_up.sum() > 0
    for lane, (first, second) in enumerate(zip(cursor.lanes, step.next_cursor.lanes, strict=True)):
        begun = windows[lane // 3]
        assert first <= (begun, 0) <= second


def test_auto_lanes_of_each_kind_follow_its_samples() -> None:
    index = SyntheticIndex(
        [
            SyntheticSource(name="text", num_samples=1_000_000),
            SyntheticSource(name="caption", num_samples=10_000, kind="caption", salt=1),
        ]
    )
    sources = tuple(SourceShare(name=s.name) for s in index.sources)
    plan = Plan(PlanSettings(sources=sources, segregate=shares(3, 1)), index)
    text, vision = plan.streams
    assert (text.num_lanes, vision.num_lanes) == (32, 2)
    assert plan.warnings == ()


def test_another_proportion_is_another_plan() -> None:
    plan = endless(shares(1, 3))
    assert plan.phase_digests == endless(shares(2, 6)).phase_digests
    assert plan.phase_digests != endless(shares(3, 1)).phase_digests
