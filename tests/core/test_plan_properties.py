"""What holds for any plan: small random settings over a synthetic index."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.uncompiled import printed_by

from dataservice.core.alignment import padded
from dataservice.core.cost import sum_groups
from dataservice.core.plan import Plan
from dataservice.core.settings import (
    Grid,
    KindShare,
    Oversize,
    Packer,
    Phase,
    PlanSettings,
    Segregation,
    SourceShare,
)
from dataservice.core.tables import REASONS, StepPlan, WindowPlan
from tests.core.planning import items_in, items_of, lost_in, pack_ids, steps_of, windows_of
from tests.core.synthetic import SyntheticIndex, SyntheticSource

INDEX = SyntheticIndex(
    [
        SyntheticSource(name="text", num_samples=70, num_shards=3, docs=3),
        SyntheticSource(name="caption", num_samples=50, num_shards=2, kind="caption", salt=1),
        SyntheticSource(name="mixed", num_samples=33, num_shards=2, kind="mixed", salt=2, markup=2),
        SyntheticSource(name="empty", num_samples=3, num_shards=1, scale=0, salt=3),
    ]
)
NAMES = tuple(source.name for source in INDEX.sources)
SIZES = [sum(source.shard_samples) for source in INDEX.sources]


_REPEATS = (("1", "1", "1", "1"), ("2", "1", "2", "1"))


@st.composite
def finite_settings(draw: st.DrawFn) -> PlanSettings:
    caps = st.none() | st.integers(1, 3)
    image_cap, token_cap, patch_cap = draw(caps), draw(caps), draw(caps)
    segregate = draw(
        st.none()
        | st.builds(
            Segregation,
            text=st.builds(KindShare, micro_steps=st.integers(1, 2)),
            vision=st.builds(KindShare, micro_steps=st.just(1), packs_per_cell=st.integers(1, 2)),
        )
    )
    first = Phase(
        windows=None if segregate else draw(st.integers(1, 4)),
        packs=draw(st.integers(1, 60)) if segregate else None,
        pack_length=draw(st.sampled_from([None, 900])),
        max_pixels=draw(st.sampled_from([None, 60 * 784])),
    )
    return PlanSettings(
        sources=tuple(
            SourceShare(name=name, repeat=repeat)
            for name, repeat in zip(NAMES, draw(st.sampled_from(_REPEATS)), strict=True)
        ),
        seed=draw(st.integers(0, 5)),
        pack_length=draw(st.sampled_from([700, 1500, 4000])),
        align=draw(st.sampled_from([1, 1, 4, 50])),
        packer=draw(st.sampled_from(get_args(Packer))),
        open_bins=draw(st.integers(1, 4)),
        image_cap=image_cap,
        image_token_cap=token_cap and token_cap * 400,
        patch_cap=patch_cap and patch_cap * 1200,
        oversize=draw(st.sampled_from(get_args(Oversize))),
        lanes=draw(st.integers(1, 3)),
        window=draw(st.integers(5, 60)),
        segment=draw(st.integers(1, 8)),
        open_segments=draw(st.integers(1, 3)),
        epochs=draw(st.integers(1, 2)),
        remainder=draw(st.sampled_from(["pad", "drop"])),
        phases=draw(st.sampled_from([(), (first, Phase())])),
        segregate=segregate,
    )


def _unit(given: PlanSettings) -> int:
    """What micro_steps must be a multiple of."""
    shares = given.segregate
    return 1 if shares is None else shares.text.micro_steps + shares.vision.micro_steps


@settings(deadline=None, max_examples=40)
@given(given=finite_settings())
def test_windows_hold_every_sample_once(given: PlanSettings) -> None:
    """Whole, as all of its pieces, as what the policy leaves of it, or counted as left out."""
    plan = Plan(given, INDEX)
    times: Counter[tuple[int, int]] = Counter()
    out = np.zeros(len(SIZES), dtype=np.int64)
    for window in windows_of(plan):
        pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, (source, row) in enumerate(
            zip(window.source.tolist(), window.row.tolist(), strict=True)
        ):
            pieces.setdefault((source, row), []).append((int(window.start[i]), int(window.stop[i])))
        columns = {key: INDEX.columns(key[0], np.array([key[1]], dtype=np.int64)) for key in pieces}
        totals = {
            (source, row): int(total)
            for source, row, total in zip(
                window.source.tolist(), window.row.tolist(), window.total_tokens, strict=True
            )
        }
        for key, found in pieces.items():
            begins = [start for start, _ in found].count(0)
            times[key] += begins
            covered = sum(stop - start for start, stop in found)
            images = len(columns[key].width)
            if images:
                assert len(found) == begins
                assert covered <= begins * totals[key]
                assert given.oversize == "truncate" or covered == begins * totals[key]
            else:
                assert covered == begins * totals[key]
        out += window.counts[REASONS.index("dropped_long")]
        out += window.counts[REASONS.index("rejected")]
    epochs = given.epochs or 0
    for number, (share, size) in enumerate(zip(given.sources, SIZES, strict=True)):
        each = int(share.repeat) * epochs
        found = [count for (source, _), count in times.items() if source == number]
        assert max(found, default=0) <= each
        assert sum(found) + int(out[number]) == each * size


def places_of(window: WindowPlan) -> NDArray[np.int64]:
    """[packs]: tokens, and the filler that their documents may need at most."""
    docs = [
        INDEX.columns(source, row[None]).documents[0]
        for source, row in zip(window.source.tolist(), window.row, strict=True)
    ]
    places = padded(window.stop - window.start, np.array(docs, dtype=np.int64), window.align)
    return sum_groups(places, window.item_offsets)


@settings(deadline=None, max_examples=40)
@given(given=finite_settings())
def test_caps_are_kept(given: PlanSettings) -> None:
    """But for a single sample that is above one, which is counted."""
    plan = Plan(given, INDEX)
    for window in windows_of(plan):
        assert window.align == given.align
        assert (places_of(window) <= window.pack_length).all()
        assert (window.tokens > 0).all()
        over = np.zeros(window.num_packs, dtype=bool)
        for cap, values in (
            (given.image_token_cap, window.image_tokens),
            (given.patch_cap, window.num_patches),
            (given.image_cap, window.num_images),
        ):
            if cap is not None:
                over |= values > cap
        with_images = (
            np.add.reduceat(window.kept_images > 0, window.item_offsets[:-1])[: window.num_packs]
            if window.num_packs
            else np.zeros(0, dtype=np.int64)
        )
        assert (with_images[over] == 1).all()
        assert window.counts[REASONS.index("over_cap")].sum() == over.sum()


@settings(deadline=None, max_examples=20)
@given(
    given=finite_settings(),
    dp_size=st.sampled_from([1, 2, 4]),
    times=st.integers(1, 2),
    homes=st.integers(-1, 2),
)
def test_steps_are_permutations_of_the_same_packs_on_any_grid(
    given: PlanSettings, dp_size: int, times: int, homes: int
) -> None:
    plan = Plan(given, INDEX)
    unit = _unit(given)
    grid = Grid(dp_size=dp_size, micro_steps=unit * times * (4 // dp_size))
    other = Grid(dp_size=4, micro_steps=unit * times)
    lane_home = [(lane + homes) % 2 if homes >= 0 else -1 for lane in range(plan.num_lanes)]
    steps = list(steps_of(plan, grid))
    delivered: list[str] = []
    for step in steps:
        _is_permutation(step, given)
        per_node = 2 if homes >= 0 else 1
        moved = plan.step(step.cursor, other, lane_home, ranks_per_node=per_node)
        assert moved is not None
        _is_permutation(moved, given)
        assert pack_ids(moved) == pack_ids(step)
        assert moved.next_cursor == step.next_cursor
        assert moved.lockstep_bound <= moved.lockstep_cost
        assert moved.moved <= moved.num_packs
        delivered += pack_ids(step)
    assert len(set(delivered)) == len(delivered)
    lost = lost_in(plan, items_in(plan, steps))
    given_up = sum((step.given_up for step in steps), np.zeros(len(SIZES), dtype=np.int64))
    end = steps[-1].next_cursor if steps else plan.start()
    rest = plan.left_over(end)
    assert plan.step(end, grid) is None
    assert lost == [int(given_up[i]) + rest.get(name, 0) for i, name in enumerate(NAMES)]
    assert given.remainder == "drop" or sum(lost) == 0
    all_phases = {step.phase for step in steps} == set(range(len(plan.phase_digests)))
    if all_phases and all(share.repeat == "1" for share in given.sources):
        _is_all_accounted_for(plan, steps, rest)


def _is_all_accounted_for(plan: Plan, steps: list[StepPlan], rest: dict[str, int]) -> None:
    """Every sample that the run reads is delivered whole, left out or given up."""
    found = Counter(rest)
    for step in steps:
        for name, reasons in plan.counts_in(step).items():
            for reason in ("dropped_long", "rejected", "cut"):
                found[name] += reasons.get(reason, 0)
    delivered = items_in(plan, steps)
    for window in windows_of(plan):
        for item, pieces in items_of(window).items():
            found[NAMES[item[2]]] += delivered[item] == pieces
    epochs = plan.settings.epochs or 0
    assert found == {name: epochs * size for name, size in zip(NAMES, SIZES, strict=True)}


def _is_permutation(step: StepPlan, given: PlanSettings) -> None:
    cells = Counter(zip(step.micro_step.tolist(), step.dp_rank.tolist(), strict=True))
    grid = step.grid
    assert set(cells) == {(g, r) for g in range(grid.micro_steps) for r in range(grid.dp_size)}
    allowed = {1} if given.segregate is None else {1, given.segregate.vision.packs_per_cell}
    assert set(cells.values()) <= allowed
    assert len(step.lane) == sum(cells.values())


# ---- any process, with and without compiled code ------------------------------------------------

_PHASES = (
    Phase(windows=2, packer="balanced"),
    Phase(windows=1, packs=70, pack_length=900),
    Phase(),
)
_APART = Segregation(text=KindShare(micro_steps=1), vision=KindShare(micro_steps=2))


def _plans() -> list[Plan]:
    given: dict[str, Any] = {
        "sources": tuple(SourceShare(name=n, weight=w) for n, w in zip(NAMES, "4321", strict=True)),
        "epochs": None,
        "pack_length": 1500,
        "lanes": 3,
        "window": 40,
        "segment": 4,
        "image_cap": 3,
    }
    plans = [PlanSettings(**given, packer=packer) for packer in get_args(Packer)]
    plans += [PlanSettings(**given, phases=_PHASES), PlanSettings(**given, segregate=_APART)]
    plans += [PlanSettings(**{**given, "oversize": policy}) for policy in get_args(Oversize)]
    return [Plan(settings, INDEX) for settings in plans]


def fingerprint() -> str:
    """Of windows, steps, digests and cursors of many kinds of plans."""
    seen = hashlib.sha256()
    for plan in _plans():
        seen.update(" ".join((plan.digest, *plan.phase_digests)).encode())
        cursor = plan.start()
        homes = [lane % 2 for lane in range(plan.num_lanes)]
        for grid in (Grid(dp_size=4, micro_steps=3), Grid(dp_size=2, micro_steps=9)) * 4:
            step = plan.step(cursor, grid, homes, ranks_per_node=1)
            assert step is not None
            for name in StepPlan.__dataclass_fields__:
                value = getattr(step, name)
                seen.update(
                    value.astype("<i8").tobytes()
                    if isinstance(value, np.ndarray)
                    else repr(value).encode()
                )
            for lane, number in sorted(
                set(zip(step.lane.tolist(), step.window.tolist(), strict=True))
            ):
                if lane >= 0:
                    window = plan.window(lane, number)
                    for name in WindowPlan.__dataclass_fields__:
                        value = np.asarray(getattr(window, name))
                        seen.update(value.astype("<i8").tobytes())
            cursor = step.next_cursor
    return seen.hexdigest()


def test_equal_in_a_fresh_process_without_compiled_code() -> None:
    code = "from tests.core.test_plan_properties import fingerprint; print(fingerprint())"
    assert printed_by(code, timeout_s=300) == fingerprint()
