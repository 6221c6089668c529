from __future__ import annotations

import dataclasses
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cost import measure
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, Phase, PlanSettings, SourceShare
from dataservice.core.tables import REASONS, StepPlan, WindowPlan
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError, ResumeRefused
from tests.core.planning import (
    INDEX,
    NAMES,
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

GRID = Grid(dp_size=4, micro_steps=3)


def phased(*phases: Phase, finite: bool = False, **changes: Any) -> Plan:
    make = make_plan if finite else endless_plan
    return make(**{"lanes": 3, "window": 30, "phases": phases, **changes})


def first_steps(plan: Plan, count: int, grid: Grid = GRID) -> list[StepPlan]:
    return [step for step, _ in zip(steps_of(plan, grid), range(count), strict=False)]


def named_items(plan: Plan, index: SyntheticIndex, window: WindowPlan) -> list[tuple[Any, ...]]:
    """A window's items with names of sources in place of numbers."""
    return [
        (index.sources[source].name, *item)
        for source, *item in zip(
            window.source.tolist(),
            window.row.tolist(),
            window.start.tolist(),
            window.stop.tolist(),
            window.image_limit.tolist(),
            strict=True,
        )
    ]


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_the_phase_of_a_step_is_known_without_placing_it(remainder: str) -> None:
    phases = (Phase(windows=1), Phase(windows=2, pack_length=1024), Phase(windows=1), Phase())
    plan = phased(*phases, finite=True, remainder=remainder)
    steps = list(steps_of(plan, GRID))
    behind = [plan.phase_of_step(step.next_cursor, GRID) for step in steps]
    assert behind == [*(step.phase for step in steps[1:]), None]
    assert set(behind) == {0, 1, 2, 3, None}
    assert plan.phase_of_step(plan.start(), GRID) == 0


# ---- what a phase is ----------------------------------------------------------------------------


def test_windows_follow_the_settings_of_their_phase() -> None:
    plan = phased(
        Phase(windows=2, max_pixels=100 * 28 * 28),
        Phase(windows=3, pack_length=4096, packer="best_fit"),
        Phase(weights=(("text", "1"),)),
    )
    phases = plan.streams[0].phases
    assert [(p.first_window, p.end_window) for p in phases] == [(0, 2), (2, 5), (5, None)]
    assert [p.packer for p in phases] == ["lbf", "best_fit", "lbf"]
    for number, (length, pixels, sources) in enumerate(
        [(2048, 100 * 784, 3), (2048, 100 * 784, 3), *[(4096, 1280 * 784, 3)] * 3, (2048, 0, 1)]
    ):
        window = plan.window(1, number)
        assert window.pack_length == length
        assert (window.tokens <= length).all()
        assert len(set(window.source.tolist())) == sources
        assert not pixels or window.image_limit.max() == pixels


def test_a_phase_of_tiles_has_its_own_most() -> None:
    plan = phased(Phase(windows=2, max_tiles=3), Phase(), vision=VisionRules(mode="tiles"))
    assert [plan.window(0, n).image_limit.max() for n in range(3)] == [3, 3, 12]


def test_packs_alone_are_turned_into_whole_windows_rounded_up() -> None:
    rules = VisionRules()
    mean = Fraction(0)
    for number, share in enumerate((Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))):
        size = sum(INDEX.sources[number].shard_samples)
        lengths = measure(INDEX.columns(number, np.arange(size)), rules=rules).length
        mean += share * int(lengths.sum()) / size
    for packs, pack_length in ((1, 2048), (100, 2048), (100, 4096), (5000, 512)):
        plan = phased(Phase(packs=packs, pack_length=pack_length), Phase())
        windows = plan.streams[0].phases[0].end_window
        assert windows is not None
        a_window = 3 * 30 * mean / pack_length
        assert (windows - 1) * a_window < packs <= windows * a_window


def test_sources_go_on_where_the_phase_before_left_them() -> None:
    """An endless pass reads every row once, however it is cut into phases."""
    one = SyntheticIndex(
        [SyntheticSource(name=n, num_samples=300, salt=i) for i, n in enumerate("ab")]
    )
    sources = tuple(SourceShare(name=n, weight="1") for n in "ab")
    weights = ((("a", "1"), ("b", "3")), (("a", "3"), ("b", "1")))
    plan = make_plan(
        one,
        sources=sources,
        epochs=None,
        lanes=3,
        window=10,
        phases=(
            Phase(windows=5, weights=weights[0]),
            Phase(windows=5, weights=weights[1]),
            Phase(windows=7, weights=(("b", "1"),)),
            Phase(weights=(("a", "1"),)),
        ),
    )
    read: Counter[tuple[int, int]] = Counter()
    for window in (plan.window(lane, w) for lane in range(3) for w in range(17)):
        items = zip(window.source.tolist(), window.row.tolist(), window.start.tolist(), strict=True)
        read.update((source, row) for source, row, start in items if start == 0)
    assert set(read.values()) <= {1, 2}
    for source, taken in ((0, 150), (1, 150 + 210)):
        found = [count for (of, _), count in read.items() if of == source]
        assert abs(sum(found) - taken) <= 3
        assert len(found) == min(sum(found), 300)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(
        st.lists(st.fractions(0, 5, max_denominator=7), min_size=3, max_size=3).filter(any),
        min_size=5,
        max_size=5,
    ),
    lanes=st.integers(1, 5),
)
def test_shares_are_exact_over_phases(
    lengths: list[int], weights: list[list[Fraction]], lanes: int
) -> None:
    """Of a source a lane has taken its exact part rounded down, whatever phases it went through."""
    named = [tuple(zip(NAMES, map(str, w), strict=True)) for w in weights]
    phases = [Phase(windows=n, weights=w) for n, w in zip(lengths, named, strict=False)]
    plan = phased(*phases, Phase(weights=named[len(lengths)]), lanes=lanes)
    mixture = plan.streams[0].mixture
    last = sum(lengths) + 3
    ends = [*np.cumsum(lengths).tolist(), last]
    for lane in range(lanes):
        taken: Counter[int] = Counter()
        for window in range(last):
            phase = mixture.phase_of(window)
            spans = mixture.in_lane(phase, lane).spans(window)
            for source, (first, stop) in zip(phase.sources, spans, strict=True):
                assert first >= taken[source.number]
                taken[source.number] = stop
        exact: Counter[int] = Counter()
        sizes: dict[int, Fraction] = {}
        for phase, first, end in zip(mixture.phases, [0, *ends], ends, strict=False):
            for source in phase.sources:
                part = Fraction(source.order.lane_size(lane), source.order.num_samples)
                sizes[source.number] = part
                exact[source.number] += (end - first) * lanes * 30 * source.share * part
        for number, value in exact.items():
            assert 0 <= value - taken[number] < 1


# ---- ends of phases -----------------------------------------------------------------------------


def test_a_phase_drains_and_the_next_begins_on_a_step() -> None:
    plan = phased(Phase(windows=2), Phase(windows=1, pack_length=4096), Phase())
    steps = first_steps(plan, 14)
    assert [step.phase for step in steps] == sorted(step.phase for step in steps)
    assert {step.phase for step in steps} == {0, 1, 2}
    number = 0
    for step, later in zip(steps, [*steps[1:], None], strict=True):
        real = step.lane >= 0
        lengths = {
            plan.window(int(a), int(w)).pack_length
            for a, w in zip(step.lane[real], step.window[real], strict=True)
        }
        assert lengths == {step.pack_length}
        assert step.pack_number[real].tolist() == list(range(number, number + int(real.sum())))
        assert (step.pack_number[~real] == -1).all()
        number += int(real.sum())
        if later is not None:
            assert real.all() or later.phase == step.phase + 1
            assert step.next_cursor == later.cursor
    for phase, windows in ((0, range(2)), (1, range(2, 3))):
        held = {
            f"{lane}.{w}.{k}"
            for lane in range(3)
            for w in windows
            for k in range(plan.window(lane, w).num_packs)
        }
        assert held == {i for step in steps if step.phase == phase for i in pack_ids(step)}


def test_drop_gives_up_the_short_rest_of_a_phase() -> None:
    plan = phased(Phase(windows=3), Phase(), remainder="drop")
    steps = first_steps(plan, 18)
    assert all((step.lane >= 0).all() for step in steps)
    (change,) = [step for step in steps if step.phase != step.cursor.phase]
    before = [step for step in steps if step.phase == 0]
    lost = lost_in(plan, items_in(plan, before), range(1))
    assert change.given_up.tolist() == lost
    assert sum(lost) > 0
    cuts = {name: reasons.get("cut", 0) for name, reasons in plan.counts_in(change).items()}
    assert [cuts.get(name, 0) for name in NAMES] == change.given_up.tolist()
    assert all(step.given_up.sum() == 0 for step in steps if step is not change)


# ---- cut ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("packs", [12, 24, 30, 31, 35, 59, 60])
def test_cut_gives_up_what_is_left_of_the_windows(packs: int, remainder: str) -> None:
    plan = phased(Phase(windows=4, packs=packs), Phase(), remainder=remainder)
    whole = phased(Phase(windows=4), Phase(), remainder=remainder)
    steps, all_steps = first_steps(plan, 9), first_steps(whole, 9)
    before = [step for step in steps if step.phase == 0]
    assert sum(len(pack_ids(step)) for step in before) == (
        packs if remainder == "pad" else packs // 12 * 12
    )
    flat = [i for step in all_steps for i in pack_ids(step)]
    cut = [i for step in before for i in pack_ids(step)]
    assert cut == flat[: len(cut)]
    after = steps[len(before)]
    assert after.phase == 1
    assert set(after.window.tolist()) == {4}
    assert after.given_up.tolist() == lost_in(plan, items_in(plan, before), range(1))


def test_cut_after_the_windows_are_used_up_changes_nothing() -> None:
    cut, drained = (phased(Phase(windows=2, packs=p), Phase()) for p in (10_000, None))
    for a, b in zip(first_steps(cut, 8), first_steps(drained, 8), strict=True):
        assert same(a, b)


def test_a_cursor_behind_the_cut_is_refused() -> None:
    plan = phased(Phase(windows=9, packs=24), Phase())
    goes_on = phased()
    cursors = [step.next_cursor for step in first_steps(goes_on, 3)]
    for cursor in cursors[:2]:
        assert plan.step(cursor, GRID) is not None
    with pytest.raises(
        ResumeRefused, match="is at pack 36, and phase 0 of this plan is cut at pack 24"
    ):
        plan.step(cursors[2], GRID)
    late = phased(Phase(windows=1), Phase())
    far = first_steps(goes_on, 9)[-1].next_cursor
    with pytest.raises(ResumeRefused, match="phase 0 of this plan has windows 0 to 0"):
        late.step(far, GRID)


def test_a_run_is_cut_where_it_stands() -> None:
    """The operator's case: stop at a cursor, cut the phase there, go on with other weights."""
    running = phased()
    at = first_steps(running, 4)[-1].next_cursor
    open_windows = max(window + (offset > 0) for window, offset in at.lanes)
    changed = phased(
        Phase(windows=open_windows, packs=at.num_packs, weights=_WEIGHTS),
        Phase(weights=(("caption", "1"),)),
    )
    assert changed.phase_digests[0] == running.phase_digests[0]
    step = changed.step(at, GRID)
    assert step is not None
    assert (step.step, step.phase, step.pack_number[0]) == (4, 1, 48)
    assert set(step.window.tolist()) == {open_windows}
    assert step.given_up.sum() > 0
    assert {source for _, _, source, _ in items_in(changed, [step])} == {1}


_WEIGHTS = (("text", "0.5"), ("caption", "0.3"), ("multi", "0.2"))


# ---- what may change behind a phase -------------------------------------------------------------


def _grown() -> SyntheticIndex:
    """With a source more, whose name sorts first and whose number comes first."""
    new = SyntheticSource(name="added", num_samples=99, kind="mixed", salt=9)
    return SyntheticIndex([new, *INDEX._sources])


def _later(index: SyntheticIndex, *phases: Phase, **changes: Any) -> Plan:
    sources = tuple(
        SourceShare(name=s.name, weight=dict(_WEIGHTS).get(s.name, "0")) for s in index.sources
    )
    given = {"lanes": 3, "window": 30, "epochs": None, **changes}
    return make_plan(index, sources=sources, phases=phases, **given)


FIRST = Phase(windows=3, weights=_WEIGHTS)


@pytest.mark.parametrize(
    "changed",
    [
        lambda: phased(FIRST, Phase(windows=2), Phase()),
        lambda: phased(FIRST, Phase(weights=(("text", "1"),))),
        lambda: phased(FIRST, Phase(max_pixels=100 * 784, packer="best_fit")),
        lambda: phased(FIRST, Phase(), remainder="drop"),
        lambda: phased(FIRST, Phase(pack_length=8192)),
        lambda: phased(),
        lambda: phased(Phase(windows=7), Phase()),
        lambda: phased(Phase(windows=2, packs=40), Phase()),
        lambda: _later(_grown(), FIRST, Phase()),
        lambda: _later(_grown(), FIRST, Phase(weights=(("added", "1"), ("text", "1")))),
        lambda: _later(_grown()),
    ],
)
def test_a_cursor_goes_on_in_a_plan_of_the_same_phase(changed: Any) -> None:
    plan, other = phased(FIRST, Phase()), changed()
    assert other.phase_digests[0] == plan.phase_digests[0]
    assert other.num_lanes == plan.num_lanes
    index = other._index
    goes_on = 0
    for step in first_steps(plan, 3):
        if step.phase == 0:
            again = other.step(step.cursor, GRID)
            assert again is not None
            goes_on += 1
            assert pack_ids(again) == pack_ids(step)
            assert again.tokens.tolist() == step.tokens.tolist()
            for lane, window in set(zip(step.lane.tolist(), step.window.tolist(), strict=True)):
                ours, theirs = plan.window(lane, window), other.window(lane, window)
                assert named_items(plan, INDEX, ours) == named_items(other, index, theirs)
    assert goes_on == 3


def test_later_phases_of_equal_plans_are_equal() -> None:
    """Over a grown index too: the digest of the second phase says so."""
    second = Phase(weights=(("caption", "2"), ("text", "1")))
    plan = phased(FIRST, second)
    same_later = _later(_grown(), FIRST, Phase(windows=2, weights=second.weights), Phase())
    assert same_later.phase_digests[:2] == plan.phase_digests
    for lane in range(3):
        ours, theirs = plan.window(lane, 4), same_later.window(lane, 4)
        assert named_items(plan, INDEX, ours) == named_items(same_later, _grown(), theirs)
    sooner = phased(dataclasses.replace(FIRST, windows=2), second)
    assert sooner.phase_digests[0] == plan.phase_digests[0]
    assert sooner.phase_digests[1] != plan.phase_digests[1]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: phased(dataclasses.replace(FIRST, pack_length=4096), Phase()),
        lambda: phased(dataclasses.replace(FIRST, max_pixels=100 * 784), Phase()),
        lambda: phased(dataclasses.replace(FIRST, packer="best_fit"), Phase()),
        lambda: phased(dataclasses.replace(FIRST, weights=(("text", "1"),)), Phase()),
        lambda: phased(FIRST, Phase(), seed=12),
        lambda: phased(FIRST, Phase(), window=31),
        lambda: phased(FIRST, Phase(), oversize="drop"),
        lambda: phased(FIRST, Phase(), image_cap=3),
        lambda: phased(FIRST, Phase(), cost="image_tokens"),
    ],
)
def test_a_phase_digest_covers_what_decides(changed: Any) -> None:
    assert changed().phase_digests[0] != phased(FIRST, Phase()).phase_digests[0]


# ---- auto lanes and window ----------------------------------------------------------------------

BIG = SyntheticIndex(
    [SyntheticSource(name="a", num_samples=400_000), SyntheticSource(name="b", num_samples=90_000)]
)


def _auto(*phases: Phase, index: SyntheticIndex = BIG, **changes: Any) -> Plan:
    weights = {"a": "3", "b": "1"}
    sources = tuple(
        SourceShare(name=s.name, weight=weights.get(s.name, "0")) for s in index.sources
    )
    return Plan(PlanSettings(sources=sources, epochs=None, phases=phases, **changes), index)


def test_auto_does_not_follow_sources_of_later_phases() -> None:
    new = SyntheticSource(name="added", num_samples=10**7, kind="caption", scale=3, salt=5)
    grown = SyntheticIndex([new, *BIG._sources])
    plan = _auto(Phase(windows=5), Phase(weights=(("added", "9"), ("a", "1"))), index=grown)
    assert plan.num_lanes == _auto().num_lanes
    assert plan.phase_digests[0] == _auto().phase_digests[0]


def test_auto_does_not_follow_later_weights_pixels_or_packers() -> None:
    alone = _auto()
    for later in (
        Phase(weights=(("b", "1"),)),
        Phase(max_pixels=784 * 9),
        Phase(packer="best_fit"),
        Phase(pack_length=2048),
    ):
        plan = _auto(Phase(windows=5), later)
        assert plan.num_lanes == alone.num_lanes
        assert plan.phase_digests[0] == alone.phase_digests[0]
        assert plan.warnings == ()


def test_auto_follows_the_longest_pack_and_says_so() -> None:
    alone = _auto()
    plan = _auto(Phase(windows=5), Phase(windows=5, pack_length=32768), Phase())
    window = plan.streams[0].mixture.window_samples
    assert window > 2 * alone.streams[0].mixture.window_samples
    assert plan.phase_digests[0] != alone.phase_digests[0]
    (warning,) = plan.warnings
    assert "lanes and window: auto follows the longest pack_length, 32768 of phases[1]" in warning
    pinned = _auto(
        Phase(windows=5),
        Phase(pack_length=32768),
        lanes=alone.num_lanes,
        window=alone.streams[0].mixture.window_samples,
    )
    assert pinned.phase_digests[0] == alone.phase_digests[0]
    assert not any("auto" in warning for warning in pinned.warnings)


# ---- finite runs --------------------------------------------------------------------------------


def test_phases_of_a_finite_run_lose_nothing() -> None:
    plan = phased(
        Phase(windows=4),
        Phase(windows=3, pack_length=4096, packer="next_fit"),
        Phase(max_pixels=100 * 784),
        finite=True,
        epochs=2,
    )
    steps = list(steps_of(plan, GRID))
    assert {step.phase for step in steps} == {0, 1, 2}
    whole = {f"{w.lane}.{w.window}.{k}" for w in windows_of(plan) for k in range(w.num_packs)}
    delivered = [i for step in steps for i in pack_ids(step)]
    assert len(delivered) == len(set(delivered))
    assert set(delivered) == whole
    read: Counter[tuple[int, int]] = Counter()
    for window in windows_of(plan):
        begin = window.start == 0
        read.update(zip(window.source[begin].tolist(), window.row[begin].tolist(), strict=True))
    assert max(read.values()) == 2
    dropped = counted(plan, "dropped_long")
    for source, size in enumerate((600, 250, 41)):
        times = sum(count for (of, _), count in read.items() if of == source)
        assert times + dropped[source] == 2 * size


@pytest.mark.parametrize("windows", [1_000, 10**9])
def test_a_phase_longer_than_the_data_warns(windows: int) -> None:
    plan = phased(Phase(windows=windows), Phase(pack_length=4096), finite=True)
    alone = phased(finite=True)
    assert "phases[1] is never reached" in " ".join(plan.warnings)
    steps, plain = list(steps_of(plan, GRID)), list(steps_of(alone, GRID))
    assert [pack_ids(step) for step in steps] == [pack_ids(step) for step in plain]
    assert {step.phase for step in steps} == {0}
    assert plan.left_over(steps[-1].next_cursor) == {}


def test_packs_longer_than_the_data() -> None:
    plan = phased(Phase(packs=10**7), Phase(), finite=True)
    assert plan.streams[0].phases[0].end_window == plan.windows_in(0)


def test_what_drop_leaves_at_the_end_is_known() -> None:
    plan = phased(Phase(windows=4), Phase(), finite=True, remainder="drop")
    steps = list(steps_of(plan, GRID))
    lost = sum(step.given_up for step in steps)
    rest = plan.left_over(steps[-1].next_cursor)
    gone = lost_in(plan, items_in(plan, steps))
    assert gone == [int(lost[s]) + rest.get(name, 0) for s, name in enumerate(NAMES)]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("dp_size", [1, 3, 40])
def test_counts_of_steps_add_up_to_those_of_windows(dp_size: int, lanes: int) -> None:
    """Also of windows without a pack, which no step names, wherever they are."""
    index = SyntheticIndex(
        [
            SyntheticSource(name="caption", num_samples=120, num_shards=1, kind="caption"),
            SyntheticSource(name="empty", num_samples=80, num_shards=1, scale=0, salt=1),
        ]
    )
    plan = make_plan(
        index,
        pack_length=800,
        lanes=lanes,
        window=3,
        oversize="drop",
        phases=(Phase(windows=5), Phase(windows=3, pack_length=400), Phase()),
    )
    assert any(window.num_packs == 0 for window in windows_of(plan))
    total: Counter[tuple[str, str]] = Counter()
    for step in steps_of(plan, Grid(dp_size=dp_size, micro_steps=1)):
        for source, reasons in plan.counts_in(step).items():
            total.update({(source, reason): n for reason, n in reasons.items()})
    held = sum(window.counts for window in windows_of(plan))
    for source, name in enumerate(("caption", "empty")):
        for reason, counts in zip(REASONS, held, strict=True):
            assert total[name, reason] == counts[source]
    assert total["empty", "rejected"] == 80


# ---- resume -------------------------------------------------------------------------------------

_RUNS: dict[str, dict[str, Any]] = {
    "phases": {"phases": (Phase(windows=2), Phase(packs=30, pack_length=4096), Phase())},
    "cut": {"phases": (Phase(windows=3, packs=31), Phase(windows=2), Phase())},
    "cut at a step": {"phases": (Phase(windows=3, packs=36), Phase())},
    "drop": {"phases": (Phase(windows=2), Phase()), "remainder": "drop"},
    "finite": {"phases": (Phase(windows=3), Phase()), "epochs": 2},
    "finite drop": {"epochs": 2, "remainder": "drop"},
}


def _run(name: str) -> Plan:
    given = {"phases": (), **_RUNS[name]}
    return phased(*given.pop("phases"), finite="epochs" in given, **given)


@pytest.mark.parametrize("run", _RUNS)
def test_resume_at_every_boundary(run: str) -> None:
    """First, last, after the last, phase changes, epoch edges, cut; and right after a restore."""
    finite = "epochs" in _RUNS[run]
    straight = first_steps(_run(run), 1000 if finite else 12)
    fresh = _run(run)
    for step in straight:
        again = fresh.step(step.cursor, GRID)
        assert again is not None
        assert same(again, step)
    end = straight[-1].next_cursor
    assert (fresh.step(end, GRID) is None) == finite
    assert fresh.skip(fresh.start(), GRID, len(straight)) == end
    other = Grid(dp_size=3, micro_steps=1)
    for step in straight[:: max(1, len(straight) // 6)]:
        if step.phase == step.cursor.phase and len(pack_ids(step)) >= 3:
            again = fresh.step(step.cursor, other)
            assert again is not None
            assert pack_ids(again) == pack_ids(step)[:3]


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "match"),
    [
        ((Phase(windows=3),), r"phases\[0\]: windows is 3 and packs is None"),
        ((Phase(), Phase()), r"phases\[0\]: windows is None and packs is None"),
        ((Phase(windows=0), Phase()), r"phases\[0\]: windows is 0"),
        ((Phase(packs=0), Phase()), r"phases\[0\]: packs is 0"),
        ((Phase(windows=1), Phase(max_pixels=9)), "less than vision.min_pixels 3136"),
        (
            (Phase(windows=1), Phase(max_tiles=9)),
            r"phases\[1\]: max_tiles is 9, which says nothing",
        ),
        ((Phase(windows=1), Phase(packer="magic")), "packer is 'magic'"),  # type: ignore[arg-type]
        ((Phase(windows=1), Phase(weights=(("no", "1"),))), "weights name 'no'"),
        ((Phase(windows=1), Phase(weights=(("text", "0"),))), r"phases\[1\]: no source has both"),
        (
            (Phase(windows=5, packs=90), Phase(windows=5, packs=90), Phase()),
            r"phases\[1\]: .* 90 is not after phases\[0\], which is cut at 90",
        ),
    ],
)
def test_wrong_phases(phases: tuple[Phase, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        phased(*phases)


def test_weights_of_phases_are_for_endless_runs() -> None:
    with pytest.raises(ConfigError, match="weights count in endless runs only"):
        phased(Phase(windows=1), Phase(weights=(("text", "1"),)), finite=True)


def test_packs_of_samples_without_tokens() -> None:
    index = SyntheticIndex([SyntheticSource(name="empty", num_samples=9, scale=0)])
    with pytest.raises(ConfigError, match="no tokens; give windows"):
        make_plan(index, phases=(Phase(packs=5), Phase()))


def test_samples_of_a_phase_without_a_pack_are_given_up_with_it() -> None:
    index = SyntheticIndex(
        [SyntheticSource(name="caption", num_samples=400, kind="caption", salt=1)]
    )
    tiny, rest = Phase(windows=2, pack_length=1), Phase(pack_length=2048)
    plan = make_plan(index=index, lanes=2, window=40, oversize="drop", phases=(tiny, rest))
    step = plan.step(plan.start(), Grid(dp_size=2, micro_steps=2))
    assert step is not None
    assert step.phase == 1
    assert plan.counts_in(step)["caption"]["cut"] == 2 * 2 * 40
