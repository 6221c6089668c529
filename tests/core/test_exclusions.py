"""What a run leaves out: step numbers, cursors and what is said to be in force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.exclusions import (
    ExcludedSample,
    Exclusions,
    SkippedSteps,
    exclusions,
    parts_of_key,
    sample_key,
)
from dataservice.core.plan.run_plan import RunPlan
from dataservice.core.settings import Grid, KindShare, Phase, Segregation
from dataservice.errors import ConfigError
from tests.core.planning import make_plan, pack_ids

GRID = Grid(dp_size=2, micro_steps=2)
PLAN = make_plan(lanes=3, window=40)


def run_of(*skips: tuple[int, int]) -> RunPlan:
    found = exclusions((), (SkippedSteps(start=a, stop=b) for a, b in skips))
    return RunPlan(plan=PLAN, grid=GRID, exclude=found)


def packs_of(run: RunPlan) -> list[list[str]]:
    """Of all steps of the run; numbers have no gaps."""
    found: list[list[str]] = []
    cursor = PLAN.start()
    while (step := run.step(cursor)) is not None:
        assert step.step == len(found)
        found.append(pack_ids(step))
        cursor = step.next_cursor
    return found


ALL = packs_of(run_of())


def by_hand(skips: list[tuple[int, int]]) -> list[list[str]]:
    """Taken out of the list of all steps, one range after the other."""
    left = list(ALL)
    for start, stop in sorted(skips):
        del left[start:stop]
    return left


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_passed_over_is_gone_and_nothing_else(data: st.DataObject) -> None:
    starts = data.draw(st.sets(st.integers(0, len(ALL) + 2), max_size=3))
    skips = [(a, a + data.draw(st.integers(1, 6))) for a in sorted(starts)]
    run = run_of(*skips)
    assert packs_of(run) == by_hand(skips)


PHASES = (Phase(windows=1), Phase(windows=2, pack_length=1024), Phase())
KINDS = Segregation(text=KindShare(micro_steps=1), vision=KindShare(micro_steps=1))


@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("division", [{"phases": PHASES}, {"segregate": KINDS}, {"epochs": 2}])
def test_phases_kinds_and_epochs_and_then_other_sizes(
    remainder: str, division: dict[str, Any]
) -> None:
    """Ranges that touch, one that leads past the end; resumed at every place."""
    plan = make_plan(lanes=3, window=30, remainder=remainder, **division)
    ahead = exclusions((), [SkippedSteps(start=a, stop=b) for a, b in ((3, 9), (4, 5), (30, 999))])
    run = RunPlan(plan=plan, grid=GRID, exclude=ahead)
    cursor, cursors = plan.start(), []
    while (step := run.step(cursor)) is not None:
        cursors.append(cursor)
        cursor = step.next_cursor
    assert len(cursors) == 30
    for grid in (Grid(dp_size=1, micro_steps=2), Grid(dp_size=4, micro_steps=2)):
        other = RunPlan(plan=plan, grid=grid, exclude=ahead)
        for cursor in cursors[::3]:
            left, at = [], cursor
            while (step := plan.step(at, grid)) is not None and len(left) < 10:
                left.append(pack_ids(step))
                at = step.next_cursor
            for skip in ahead.skips:
                if skip.start >= cursor.step:
                    del left[skip.start - cursor.step : skip.stop - cursor.step]
            for packs in left:
                step = other.step(cursor)
                assert step is not None and pack_ids(step) == packs
                cursor = step.next_cursor


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 20), count=st.integers(1, 5), at=st.integers(0, 25))
def test_any_step_is_reached_by_skip_and_by_its_cursor(start: int, count: int, at: int) -> None:
    run = run_of((start, start + count), (start + 3, start + 5))
    expected = by_hand([(start, start + count), (start + 3, start + 5)])
    step = run.step(run.skip(PLAN.start(), at))
    assert (None if step is None else pack_ids(step)) == (
        expected[at] if at < len(expected) else None
    )


def test_a_step_begins_where_it_did_before_it_was_excluded() -> None:
    before = PLAN.skip(PLAN.start(), GRID, 4)
    step = run_of((4, 6)).step(before)
    assert step is not None
    assert (step.step, pack_ids(step)) == (4, ALL[6])
    assert run_of((4, 6)).skip(PLAN.start(), 4) == before


def test_what_is_in_force_is_a_matter_of_the_steps_before() -> None:
    samples = [ExcludedSample(key="a/b@0", from_step=3), ExcludedSample(key="a/b@9", from_step=5)]
    found = exclusions(samples, [SkippedSteps(start=7, stop=9)])
    assert found.in_force(2) == Exclusions().in_force(10) == ""
    assert found.in_force(3).startswith("1 sample (")
    assert found.in_force(5) == exclusions(samples, ()).in_force(100)
    assert found.in_force(7).startswith("2 samples, steps 7:9 (")
    assert len({found.in_force(step) for step in range(10)}) == 4
    later = [ExcludedSample(key="a/b@0", from_step=4), samples[1]]
    assert exclusions(later, ()).in_force(9) != exclusions(samples, ()).in_force(9)
    assert found.samples_at(4) == {"a/b@0"}
    assert exclusions([*later, samples[0]], ()) == exclusions(samples, ())


def test_ranges_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps 5:5 are none"):
        exclusions((), [SkippedSteps(start=5, stop=5)])
    with pytest.raises(ConfigError, match="begin at the same step"):
        exclusions((), [SkippedSteps(start=5, stop=7), SkippedSteps(start=5, stop=6)])


def test_sample_keys() -> None:
    assert sample_key("a/x/y@z.jsonl@15[0:8]") == "a/x/y@z.jsonl@15"
    assert parts_of_key("a/x/y@z.jsonl@15") == ("a", "x/y@z.jsonl", 15)
    for wrong in ("a", "a/b", "a/b@", "/b@1", "a/b@1#record"):
        with pytest.raises(ValueError, match="sample key"):
            sample_key(wrong)
