from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cursor import Cursor
from dataservice.core.packspec import padding_id
from dataservice.core.plan import Plan
from dataservice.core.settings import (
    BalanceSettings,
    Grid,
    KindShare,
    Packer,
    Phase,
    Segregation,
    SourceShare,
)
from dataservice.core.tables import StepPlan, WindowPlan
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError, ResumeRefused
from tests.core.planning import (
    INDEX,
    NAMES,
    counted,
    endless_plan,
    make_plan,
    pack_ids,
    same,
    steps_of,
    windows_of,
)
from tests.core.synthetic import SyntheticIndex, SyntheticSource


def _times_read(plan: Plan) -> list[Counter[int]]:
    """Per source: how often each row was read, by tokens; dropped rows checked by count."""
    tokens: list[Counter[int]] = [Counter() for _ in NAMES]
    length: list[dict[int, int]] = [{} for _ in NAMES]
    for window in windows_of(plan):
        columns = (window.source, window.row, window.stop - window.start, window.total_tokens)
        for source, row, size, total in zip(*(c.tolist() for c in columns), strict=True):
            tokens[source][row] += size
            length[source][row] = total
    for source, counts in enumerate(tokens):
        for row in counts:
            assert counts[row] % length[source][row] == 0
            counts[row] //= length[source][row]
    return tokens


# ---- finite runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repeats", "epochs", "times"),
    [
        (("1", "1", "1"), 1, (1, 1, 1)),
        (("2", "1", "3"), 1, (2, 1, 3)),
        (("1/2", "1", "2"), 2, (1, 2, 4)),
        (("3/2", "0.5", "1"), 2, (3, 1, 2)),
    ],
)
@pytest.mark.parametrize("lanes", [None, 1, 4, 7])
def test_no_sample_lost_or_doubled(
    repeats: tuple[str, ...], epochs: int, times: tuple[int, ...], lanes: int | None
) -> None:
    sources = tuple(SourceShare(name=n, repeat=r) for n, r in zip(NAMES, repeats, strict=True))
    plan = make_plan(sources=sources, epochs=epochs, lanes=lanes, window=lanes and 30)
    read = _times_read(plan)
    dropped = counted(plan, "dropped_long")
    for source, (counts, each) in enumerate(zip(read, times, strict=True)):
        assert set(counts.values()) == {each}
        rows = sum(INDEX.sources[source].shard_samples)
        assert len(counts) * each + int(dropped[source]) == rows * each


def test_steps_deliver_every_pack_once() -> None:
    plan = make_plan(lanes=4, window=40)
    expected = {f"{w.lane}.{w.window}.{k}" for w in windows_of(plan) for k in range(w.num_packs)}
    for grid in (Grid(dp_size=2, micro_steps=3), Grid(dp_size=5, micro_steps=4, packs_per_cell=2)):
        delivered = [pack_id for step in steps_of(plan, grid) for pack_id in pack_ids(step)]
        assert len(delivered) == len(set(delivered))
        assert set(delivered) == expected


def test_windows_do_not_mix_epochs() -> None:
    plan = make_plan(epochs=2, lanes=2, window=100)
    assert plan.windows_in(0) is not None
    half = plan.windows_in(0) // 2
    for windows in (range(half), range(half, 2 * half)):
        rows = Counter(
            (int(s), int(r))
            for lane in range(2)
            for number in windows
            for s, r in zip(*_rows(plan.window(lane, number)), strict=True)
        )
        assert set(rows.values()) == {1}


def _rows(window: WindowPlan) -> tuple[Any, Any]:
    first = window.start == 0
    return window.source[first], window.row[first]


def test_oversize_text_is_split_and_pictures_are_dropped() -> None:
    plan = make_plan(pack_length=256, lanes=1, window=200)
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for window in windows_of(plan):
        assert (window.tokens <= 256).all()
        for item in zip(
            window.source, window.row, window.start, window.stop, window.total_tokens, strict=True
        ):
            source, row, start, stop, total = map(int, item)
            pieces.setdefault((source, row), []).append((start, stop, total))
    assert any(len(found) > 1 for found in pieces.values())
    for (source, _), found in pieces.items():
        total = found[0][2]
        edges = [*range(0, total, 256), total]
        assert sorted(found) == [(a, b, total) for a, b in itertools.pairwise(edges)]
        assert source == 0 or len(found) == 1 or total > 256
    dropped = counted(plan, "dropped_long")
    assert dropped[0] == 0
    assert dropped[1] > 0
    kept = Counter(source for source, _ in pieces)
    assert [kept[s] + int(dropped[s]) for s in range(3)] == [600, 250, 41]


def test_planned_loss_tokens_of_pieces() -> None:
    plan = make_plan(pack_length=256, lanes=1, window=200)
    for window in windows_of(plan):
        by_item = []
        for source, row, start, stop, total in zip(
            window.source, window.row, window.start, window.stop, window.total_tokens, strict=True
        ):
            loss = int(INDEX.columns(int(source), np.array([row])).loss_tokens[0])
            share = loss * int(stop) // int(total) - loss * int(start) // int(total)
            by_item.append(share - (1 if start > 0 and share > 0 else 0))
        sums = np.add.reduceat(np.array(by_item), window.item_offsets[:-1])
        assert window.loss_tokens.tolist() == sums.tolist()


def test_empty_samples_are_dropped_and_counted() -> None:
    index = SyntheticIndex(
        [
            SyntheticSource(name="empty", num_samples=20, scale=0),
            SyntheticSource(name="text", num_samples=30),
        ]
    )
    plan = make_plan(index)
    assert counted(plan, "rejected").tolist() == [20, 0]
    assert {int(s) for window in windows_of(plan) for s in window.source} == {1}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_data_set_of_a_few_samples(count: int) -> None:
    index = SyntheticIndex([SyntheticSource(name="text", num_samples=count, num_shards=1)])
    plan = make_plan(index, pack_length=8192)
    assert plan.num_lanes <= 2
    read = [window.row.tolist() for window in windows_of(plan)]
    assert sorted(row for rows in read for row in rows) == list(range(count))


def test_image_token_cap_holds() -> None:
    vision = VisionRules(max_pixels=700 * 28 * 28)
    changes: dict[str, Any] = {"sources": (SourceShare(name="caption"),), "vision": vision}
    peaks = {}
    for cap in (None, 1500):
        plan = make_plan(pack_length=8192, image_token_cap=cap, **changes)
        peaks[cap] = max(int(window.image_tokens.max(initial=0)) for window in windows_of(plan))
    assert peaks[1500] <= 1500 < peaks[None]


# ---- windows are pure ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    wanted=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=6),
    packer=st.sampled_from(get_args(Packer)),
)
def test_a_window_depends_on_its_numbers_alone(wanted: list[tuple[int, int]], packer: str) -> None:
    first = endless_plan(lanes=4, window=50, packer=packer)
    windows = {where: first.window(*where) for where in wanted}
    fresh = endless_plan(lanes=4, window=50, packer=packer)
    for where in reversed(wanted):
        assert same(fresh.window(*where), windows[where])


def test_threads_see_the_same_windows() -> None:
    plan, fresh = endless_plan(lanes=4, window=50), endless_plan(lanes=4, window=50)
    where = [(lane, window) for window in range(8) for lane in range(4)] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: plan.window(*at), where))
    assert all(same(window, fresh.window(*at)) for at, window in zip(where, found, strict=True))


def test_samples_are_mixed_and_shuffled() -> None:
    window = make_plan(lanes=1, window=400).window(0, 0)
    assert len(set(window.source[:30].tolist())) > 1
    assert window.row[window.source == 0].tolist() != sorted(window.row[window.source == 0])


def test_windows_that_do_not_exist() -> None:
    plan = make_plan(lanes=2, window=50)
    for lane, window in ((2, 0), (-1, 0), (0, -1), (0, plan.windows_in(0) or 0)):
        with pytest.raises(ValueError, match="does not exist"):
            plan.window(lane, window)


# ---- endless runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 4])
def test_endless_shares_are_exact(lanes: int) -> None:
    plan = endless_plan(lanes=lanes, window=37, pack_length=65536)
    counts = np.zeros(3, dtype=np.int64)
    windows = 60
    for lane in range(lanes):
        for window in range(windows):
            counts += np.bincount(plan.window(lane, window).source, minlength=3)
    exact = np.array([0.5, 0.3, 0.2]) * lanes * 37 * windows
    assert np.abs(counts - exact).max() < lanes


def test_endless_shares_by_tokens() -> None:
    plan = endless_plan(lanes=2, window=200, weight_by="tokens", pack_length=65536)
    tokens = np.zeros(3)
    for window in range(50):
        for lane in range(2):
            planned = plan.window(lane, window)
            tokens += np.bincount(planned.source, planned.total_tokens, minlength=3)
    assert np.abs(tokens / tokens.sum() - [0.5, 0.3, 0.2]).max() < 0.02


def test_endless_goes_on() -> None:
    plan = endless_plan(lanes=4, window=50)
    assert plan.windows_in(0) is None
    far = Cursor(step=9, phase=0, next_pack=(9,), lanes=((10**9, 0),) * 4, next_lane=(2,))
    step = plan.step(far, Grid(dp_size=2, micro_steps=4))
    assert step is not None
    assert step.lane.tolist() == [2, 3, 0, 1, 2, 3, 0, 1]
    assert set(step.window.tolist()) == {10**9}


def test_endless_lanes_without_samples_are_skipped() -> None:
    index = SyntheticIndex([SyntheticSource(name="text", num_samples=3, num_shards=1)])
    sources = (SourceShare(name="text", weight="1"),)
    plan = make_plan(index, sources=sources, epochs=None, lanes=8, window=4)
    step = plan.step(plan.start(), Grid(dp_size=2, micro_steps=6))
    assert step is not None
    assert len(set(step.lane.tolist())) == 3


def test_endless_run_in_which_nothing_fits_ends() -> None:
    index = SyntheticIndex([SyntheticSource(name="pictures", num_samples=50, kind="caption")])
    sources = (SourceShare(name="pictures", weight="1"),)
    plan = make_plan(index, sources=sources, epochs=None, pack_length=4)
    assert plan.step(plan.start(), Grid(dp_size=1, micro_steps=1)) is None


# ---- steps and cursors --------------------------------------------------------------------------


def test_same_packs_for_grids_of_one_size_and_same_order_for_any() -> None:
    plan = make_plan(lanes=4, window=40)
    four, two = (list(steps_of(plan, Grid(dp_size=r, micro_steps=16 // r))) for r in (4, 2))
    assert [pack_ids(step) for step in four] == [pack_ids(step) for step in two]
    assert [step.next_cursor for step in four] == [step.next_cursor for step in two]
    odd = list(steps_of(plan, Grid(dp_size=3, micro_steps=5)))
    flat = [pack_id for step in four for pack_id in pack_ids(step)]
    assert [pack_id for step in odd for pack_id in pack_ids(step)] == flat


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_cursor_is_a_function_of_the_packs_before_it(sizes: list[int]) -> None:
    plan = make_plan(lanes=4, window=40)
    cut = plan.start()
    for size in sizes:
        cut = plan.skip(cut, Grid(dp_size=size, micro_steps=1), 1)
    straight = plan.skip(plan.start(), Grid(dp_size=sum(sizes), micro_steps=1), 1)
    assert cut == dataclasses.replace(straight, step=len(sizes))


def test_packs_go_round_the_lanes_until_they_end() -> None:
    plan = make_plan(lanes=4, window=40)
    lanes = [
        int(lane) for step in steps_of(plan, Grid(dp_size=7, micro_steps=1)) for lane in step.lane
    ]
    lanes = [lane for lane in lanes if lane >= 0]
    held = [sum(w.num_packs for w in windows_of(plan) if w.lane == lane) for lane in range(4)]
    expected = [lane for i in range(max(held)) for lane in range(4) if i < held[lane]]
    assert lanes == expected


def test_resume_in_the_middle_equals_the_straight_run() -> None:
    grid = Grid(dp_size=4, micro_steps=4)
    straight = list(steps_of(make_plan(lanes=4, window=40), grid))
    resumed = make_plan(lanes=4, window=40).step(straight[5].cursor, grid)
    assert resumed is not None
    for field in dataclasses.fields(StepPlan):
        a, b = getattr(resumed, field.name), getattr(straight[5], field.name)
        assert np.array_equal(a, b), field.name


@pytest.mark.parametrize("lanes", [1, 4])
def test_remainder(lanes: int) -> None:
    grid = Grid(dp_size=4, micro_steps=8)
    padded = list(steps_of(make_plan(lanes=lanes, window=40), grid))
    dropped = list(steps_of(make_plan(lanes=lanes, window=40, remainder="drop"), grid))
    last = padded[-1]
    short = int((last.lane < 0).sum())
    assert 0 < short < 32
    assert len(dropped) == len(padded) - 1
    assert last.next_cursor.next_pack == (32 * len(padded) - short,)
    pads = last.lane < 0
    assert (last.home[pads] == -1).all()
    assert last.tokens[pads].sum() == last.cost[pads].sum() == last.loss_tokens[pads].sum() == 0
    assert [last.pack_id(i) for i in np.flatnonzero(pads)] == [padding_id(2048)] * short
    plan = make_plan(lanes=lanes, window=40)
    assert plan.step(last.next_cursor, grid) is None
    assert plan.skip(last.next_cursor, grid, 100) == last.next_cursor


def test_homes_and_balance() -> None:
    plan = make_plan(lanes=4, window=40)
    grid = Grid(dp_size=4, micro_steps=4)
    step = plan.step(plan.start(), grid, [1, 0, 1, 0], ranks_per_node=2)
    assert step is not None
    assert step.home.tolist() == [[1, 0, 1, 0][lane] for lane in step.lane]
    assert step.lockstep_cost == step.lockstep_bound <= step.lockstep_arrival
    assert step.moved == (step.dp_rank // 2 != step.home).sum()
    images = np.zeros(4, dtype=np.int64)
    np.add.at(images, step.micro_step, step.num_images)
    assert images[0] == 0
    assert (np.diff((images > 0).astype(int)) >= 0).all()
    assert step.total_loss_tokens == step.loss_tokens.sum()

    off = make_plan(lanes=4, window=40, balance=BalanceSettings(enabled=False))
    arrived = off.step(off.start(), grid, [1, 0, 1, 0], ranks_per_node=2)
    assert arrived is not None
    assert arrived.micro_step.tolist() == [i // 4 for i in range(16)]
    assert arrived.dp_rank.tolist() == [i % 4 for i in range(16)]
    assert arrived.lockstep_cost == arrived.lockstep_arrival == step.lockstep_arrival
    assert pack_ids(arrived) == pack_ids(step)
    with pytest.raises(ValueError, match="3 lanes"):
        plan.step(plan.start(), grid, [0, 0, 0])
    with pytest.raises(ValueError, match="dp_size is 0"):
        plan.step(plan.start(), Grid(dp_size=0, micro_steps=4))


@pytest.mark.parametrize(
    "changes",
    [
        {"lanes": ((0, 0),) * 3},
        {"lanes": ((0, 0), (0, 0), (0, 0), (10**6, 0))},
        {"lanes": ((0, 0), (0, 0), (0, 0), (0, 10**6))},
        {"lanes": ((0, 0), (0, 0), (0, 0), (-1, 0))},
        {"next_lane": (4,)},
        {"next_lane": (0, 0)},
        {"next_pack": (0, 0)},
        {"phase": 1},
        {"phase": -1},
    ],
)
def test_cursors_of_another_plan_are_refused(changes: dict[str, Any]) -> None:
    plan = make_plan(lanes=4, window=40)
    cursor = dataclasses.replace(plan.start(), **changes)
    with pytest.raises(ResumeRefused, match="plan that wrote the cursor"):
        plan.step(cursor, Grid(dp_size=2, micro_steps=4))


# ---- settings and digest ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pack_length": 0}, "pack_length is 0"),
        ({"lanes": 0}, "lanes is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"packer": "magic"}, "packer is 'magic'; it must be one of"),
        ({"cost": "time"}, "cost is 'time'"),
        ({"balance": BalanceSettings(sync_domain=0)}, "sync_domain is 0"),
        ({"balance": BalanceSettings(min_images_per_rank=-1)}, "min_images_per_rank is -1"),
        ({"balance": BalanceSettings(tolerance=-0.1)}, "tolerance is -0.1"),
        ({"balance": BalanceSettings(tolerance=float("nan"))}, "tolerance is nan"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_plan(**changes)


def test_a_sync_domain_has_to_divide_the_dp_size() -> None:
    plan = make_plan(balance=BalanceSettings(sync_domain=3))
    assert plan.step(plan.start(), Grid(dp_size=6, micro_steps=2)) is not None
    with pytest.raises(ConfigError, match=r"sync_domain is 3, .* DP size, 4; choose one"):
        plan.step(plan.start(), Grid(dp_size=4, micro_steps=2))


def test_digest_covers_what_decides() -> None:
    digests = {
        make_plan().digest,
        make_plan(seed=12).digest,
        make_plan(packer="best_fit").digest,
        make_plan(lanes=2).digest,
        make_plan(window=50).digest,
        make_plan(balance=BalanceSettings(tolerance=0.02)).digest,
        make_plan(SyntheticIndex(INDEX._sources, fingerprint="another tokenizer")).digest,
        make_plan(SyntheticIndex([dataclasses.replace(INDEX._sources[0], num_samples=601)])).digest,
        make_plan(SyntheticIndex([dataclasses.replace(INDEX._sources[0], num_shards=6)])).digest,
    }
    assert len(digests) == 9
    assert make_plan().digest == make_plan().digest
    resolved = make_plan()
    assert resolved.digest != make_plan(lanes=resolved.num_lanes).digest


GOLDEN = {
    "plain": (
        "4532559206fea1d6b5805cff33f548ff59ef17726f5364c0f8f03ba04eac7880",
        "1337da562c695edd0ea7ff5210dd6f94faf9f2c93b7cfd27fed4e3e7e9edc8fd",
    ),
    "segregated phases": (
        "6e3765f0b5ac1829c3363d322ace44c8506124183cb7ea1e9355d01868b682b7",
        "69275a0f4592d155dcf552428353fd2d1323428d1ec10e1620d47382c72c00c1",
    ),
}


def _golden_plan(name: str) -> Plan:
    if name == "plain":
        return make_plan(lanes=4, window=60)
    kinds = Segregation(
        text=KindShare(micro_steps=1, packs_per_cell=2), vision=KindShare(micro_steps=2)
    )
    phases = (Phase(windows=1, vision_windows=1, max_pixels=100_000), Phase(pack_length=1024))
    return make_plan(lanes=2, window=60, segregate=kinds, phases=phases, oversize="truncate")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plan(name: str) -> None:
    """Breaks when code changes a plan: then raise PLAN_VERSION and note it in the changelog."""
    plan = _golden_plan(name)
    seen = hashlib.sha256()
    for lane, number in ((0, 0), (3, 1), (1, 2)):
        window = plan.window(lane, number)
        for column in dataclasses.fields(WindowPlan)[4:]:
            seen.update(getattr(window, column.name).astype("<i8").tobytes())
    step = plan.step(plan.start(), Grid(dp_size=4, micro_steps=3), [0, 1, 0, 1], ranks_per_node=2)
    assert step is not None
    for column in ("pack_number", "lane", "window", "number", "micro_step", "dp_rank"):
        seen.update(getattr(step, column).astype("<i8").tobytes())
    assert (plan.digest, seen.hexdigest()) == GOLDEN[name]
