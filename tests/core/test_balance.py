from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.balance import Assignment, arrival, assign, evaluate, lockstep_of

Ints = NDArray[np.int64]


def _step(
    ranks: int, steps: int, nodes: int, seed: int, *, text: float = 0.0, k: int = 1
) -> tuple[Ints, Ints]:
    """Skewed costs, `text` of them 0, and homes on `nodes` nodes."""
    rng = np.random.Generator(np.random.Philox(seed))
    count = ranks * steps * k
    cost = (np.exp(rng.normal(0, 0.5, count)) * 1e6).astype(np.int64)
    cost[rng.random(count) < text] = 0
    return cost, rng.integers(0, nodes, count)


def _cells(found: Assignment, cost: Ints, ranks: int, steps: int) -> Ints:
    cells = np.zeros((steps, ranks), dtype=np.int64)
    np.add.at(cells, (found.micro_step, found.dp_rank), cost)
    return cells


def _short(found: Assignment, images: Ints, ranks: int, steps: int, least: int = 1) -> int:
    """Cells with fewer images than that."""
    return int((_cells(found, images, ranks, steps) < least).sum())


def _check(found: Assignment, cost: Ints, home: Ints, **grid: int) -> None:
    """A permutation with k packs a cell, whose achieved values are what they say."""
    ranks, steps, k = grid["dp_size"], grid["micro_steps"], grid.get("packs_per_cell", 1)
    domain, per_node = grid.get("sync_domain", ranks), grid.get("ranks_per_node", 1)
    held = np.bincount(found.micro_step * ranks + found.dp_rank, minlength=ranks * steps)
    assert (held == k).all()
    cells = _cells(found, cost, ranks, steps)
    assert found.lockstep == cells.max(axis=1).sum() >= found.lockstep_bound
    by_domain = cells.reshape(steps, ranks // domain, domain).max(axis=2)
    assert found.sync == by_domain.sum(axis=0).max() >= found.sync_bound
    assert found.end == cells.sum(axis=0).max() >= found.end_bound
    node = found.dp_rank // per_node
    known = (home >= 0) & (home < ranks // per_node)
    assert found.moved == (known & (node != home)).sum() >= found.moved_bound


grids = st.sampled_from(
    [
        (1, 1, 1, 1),
        (4, 3, 2, 4),
        (4, 3, 2, 2),
        (4, 3, 2, 1),
        (6, 2, 2, 3),
        (6, 4, 3, 2),
        (8, 1, 4, 8),
    ]
)


@settings(deadline=None, max_examples=150)
@given(
    grid=grids,
    k=st.integers(1, 3),
    tolerance=st.sampled_from([0.0, 0.01, 0.5]),
    data=st.data(),
)
def test_always_a_permutation_with_honest_figures(
    grid: tuple[int, int, int, int], k: int, tolerance: float, data: st.DataObject
) -> None:
    ranks, steps, per_node, domain = grid
    count = ranks * steps * k
    cost = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    home = np.array(data.draw(st.lists(st.integers(-1, 4), min_size=count, max_size=count)))
    shape = {
        "dp_size": ranks,
        "micro_steps": steps,
        "ranks_per_node": per_node,
        "sync_domain": domain,
        "packs_per_cell": k,
    }
    found = assign(cost, home, tolerance=tolerance, **shape)
    _check(found, cost, home, **shape)
    if domain == ranks and k == 1:
        assert found.lockstep == found.lockstep_bound
    again = assign(cost.astype(np.int32), home.astype(np.int16), tolerance=tolerance, **shape)
    assert found.micro_step.tobytes() == again.micro_step.tobytes()
    assert found.dp_rank.tobytes() == again.dp_rank.tobytes()
    seen = evaluate(cost, home, found.micro_step, found.dp_rank, **shape)
    for name in (f.name for f in dataclasses.fields(seen)):
        assert np.array_equal(getattr(seen, name), getattr(found, name)), name


@pytest.mark.parametrize("seed", range(3))
def test_movement_reaches_its_bound_when_totals_do_not_matter(seed: int) -> None:
    cost, home = _step(16, 8, 4, seed)
    found = assign(cost, home, dp_size=16, micro_steps=8, ranks_per_node=4, tolerance=1000.0)
    assert found.moved == found.moved_bound
    assert found.lockstep == found.lockstep_bound


def _packs(mix: str, ranks: int, steps: int, nodes: int) -> tuple[Ints, Ints]:
    """Costs of 8K packs: image tokens of a mix of images (CV .34, at most 1.7 of the mean), of web
    text with few heavy documents (CV 1.4, at most 7), or the time of such images (CV .75)."""
    rng = np.random.Generator(np.random.Philox(key=3))
    count = ranks * steps
    normal = rng.normal(0, 1, count)
    home = rng.permutation(np.arange(count) % nodes)
    spread = np.exp(rng.normal(0, 0.1, nodes))[home]
    cost = {
        "images": np.clip(4700 * spread * (1 + 0.33 * normal), 0, 8000),
        "text": np.minimum(1300 * spread * np.exp(0.8 * normal), 7900) * (rng.random(count) < 0.6),
        "quadratic": np.minimum(2e7 * spread * np.exp(0.65 * normal), 1e8),
    }[mix]
    return cost.astype(np.int64), home


@pytest.mark.parametrize("mix", ["images", "text", "quadratic"])
@pytest.mark.parametrize("domain", [1, 8, 64, 256, 512, 1024])
def test_quality_at_a_thousand_ranks(mix: str, domain: int) -> None:
    cost, home = _packs(mix, 1024, 16, 128)
    found = assign(cost, home, dp_size=1024, micro_steps=16, ranks_per_node=8, sync_domain=domain)
    assert found.sync <= 1.02 * found.sync_bound
    if domain == 1024:
        assert found.lockstep == found.lockstep_bound
        assert found.end <= 1.02 * found.end_bound
        assert found.moved <= found.moved_bound + 0.03 * len(cost)


@pytest.mark.parametrize("mix", ["images", "text", "quadratic"])
def test_quality_at_few_ranks(mix: str) -> None:
    cost, home = _packs(mix, 64, 16, 8)
    found = assign(cost, home, dp_size=64, micro_steps=16, ranks_per_node=8)
    assert found.lockstep == found.lockstep_bound
    assert found.end <= 1.02 * found.end_bound
    assert found.moved <= found.moved_bound + 0.03 * len(cost)


@pytest.mark.parametrize("domain", [1, 4, 16])
@pytest.mark.parametrize("text", [0.0, 0.7])
def test_blocks_beat_rows_at_their_own_domain(domain: int, text: float) -> None:
    cost, home = _step(64, 16, 8, 2, text=text)
    shape = {"dp_size": 64, "micro_steps": 16, "ranks_per_node": 8}
    found = assign(cost, home, sync_domain=domain, tolerance=0.0, **shape)
    rows = assign(cost, home, tolerance=0.0, **shape)
    by_domain = _cells(rows, cost, 64, 16).reshape(16, 64 // domain, domain).max(axis=2)
    assert found.sync <= by_domain.sum(axis=0).max()
    assert found.sync <= 1.02 * found.sync_bound


def test_domains_stay_within_the_tolerance() -> None:
    cost, home = _step(64, 16, 8, 3)
    shape = {"dp_size": 64, "micro_steps": 16, "ranks_per_node": 8, "sync_domain": 8}
    tight = assign(cost, home, tolerance=0.0, **shape)
    loose = assign(cost, home, tolerance=0.05, **shape)
    assert tight.sync <= loose.sync <= 1.05 * tight.sync
    assert loose.moved < tight.moved


@pytest.mark.parametrize("value", [0, 5])
@pytest.mark.parametrize("domain", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 2])
def test_equal_costs_move_nothing(value: int, domain: int, k: int) -> None:
    count = 16 * 4 * k
    home = np.repeat(np.arange(4), count // 4)
    home = home[np.argsort(np.random.Generator(np.random.Philox(1)).random(count))]
    found = assign(
        np.full(count, value),
        home,
        dp_size=16,
        micro_steps=4,
        ranks_per_node=4,
        sync_domain=domain,
        packs_per_cell=k,
    )
    assert found.moved == 0
    assert found.sync == found.sync_bound
    assert found.lockstep == 4 * k * value


def test_text_only_micro_steps_come_first() -> None:
    cost, home = _step(8, 8, 2, 4, text=0.5)
    for domain in (8, 4):
        found = assign(cost, home, dp_size=8, micro_steps=8, ranks_per_node=4, sync_domain=domain)
        peaks = _cells(found, cost, 8, 8).reshape(8, 8 // domain, domain).max(axis=2)
        assert (np.diff(peaks, axis=0) >= 0).all()
        assert (peaks[0] == 0).all()


def test_one_giant_image() -> None:
    cost, home = _step(4, 4, 4, 5)
    cost[7] = 10**9
    found = assign(cost, home, dp_size=4, micro_steps=4, tolerance=0)
    cells = _cells(found, cost, 4, 4)
    giant = found.dp_rank[7]
    others = np.delete(cells, found.micro_step[7], axis=0)
    assert cells[:, giant].sum() == 10**9 + others.min(axis=1).sum()
    assert found.end == found.end_bound
    assert found.lockstep == found.lockstep_bound


def test_one_rank_only_orders() -> None:
    cost, home = _step(1, 5, 1, 6)
    found = assign(cost, home, dp_size=1, micro_steps=5)
    assert (found.dp_rank == 0).all()
    assert (np.diff(cost[np.argsort(found.micro_step)]) >= 0).all()
    assert found.moved == 0


def test_one_micro_step_keeps_everything_at_home() -> None:
    cost, _ = _step(8, 1, 1, 7)
    home = np.array([1, 0, 1, 0, 0, 1, 1, 0])
    for domain in (8, 4, 1):
        found = assign(cost, home, dp_size=8, micro_steps=1, ranks_per_node=4, sync_domain=domain)
        assert found.moved == 0
        assert found.lockstep == cost.max()


def test_a_node_with_more_packs_than_room() -> None:
    cost = np.arange(16) * 0 + 3
    home = np.zeros(16, dtype=np.int64)
    found = assign(cost, home, dp_size=4, micro_steps=4, ranks_per_node=2)
    assert found.moved == found.moved_bound == 8


def test_homes_outside_the_nodes_are_nowhere() -> None:
    cost, _ = _step(4, 2, 1, 8)
    for home in (-1, -7, 2, 99):
        found = assign(cost, np.full(8, home), dp_size=4, micro_steps=2, ranks_per_node=2)
        assert found.moved == found.moved_bound == 0


def test_cells_of_several_packs_are_even() -> None:
    cost, home = _step(16, 4, 2, 9, k=4)
    found = assign(cost, home, dp_size=16, micro_steps=4, ranks_per_node=8, packs_per_cell=4)
    assert found.lockstep <= 1.02 * found.lockstep_bound
    dealt = arrival(len(cost), dp_size=16, packs_per_cell=4)
    assert found.lockstep < lockstep_of(cost, *dealt, dp_size=16, micro_steps=4)


@pytest.mark.parametrize("domain", [16, 4, 1])
def test_heavy_packs_share_cells_with_light_ones(domain: int) -> None:
    cost, home = _packs("text", 32, 16, 2)
    found = assign(
        cost,
        home,
        dp_size=16,
        micro_steps=16,
        ranks_per_node=8,
        sync_domain=domain,
        packs_per_cell=2,
    )
    assert found.sync <= 1.06 * found.sync_bound


def test_padding_is_never_moved() -> None:
    cost, home = _step(8, 4, 2, 12)
    cost[27:], home[27:] = 0, -1
    found = assign(cost, home, dp_size=8, micro_steps=4, ranks_per_node=4, tolerance=0.1)
    _check(found, cost, home, dp_size=8, micro_steps=4, ranks_per_node=4)
    assert (found.micro_step[27:] == 0).all()
    nowhere = assign(cost * 0, home * 0 - 1, dp_size=8, micro_steps=4, ranks_per_node=4)
    assert nowhere.moved == nowhere.moved_bound == 0


def test_bytes_moved() -> None:
    cost = np.full(16, 3)
    home = np.zeros(16, dtype=np.int64)
    size = np.arange(16) + 100
    found = assign(cost, home, dp_size=4, micro_steps=4, ranks_per_node=2, size_bytes=size)
    away = found.dp_rank >= 2
    assert found.moved_bytes == size[away].sum()
    rows = np.sort(size[np.argsort(found.micro_step, kind="stable")].reshape(4, 4), axis=1)
    assert found.moved_bytes_bound == rows[:, :2].sum() <= found.moved_bytes
    apart = assign(
        cost, home, dp_size=4, micro_steps=4, ranks_per_node=2, size_bytes=size, sync_domain=2
    )
    assert apart.moved_bytes_bound == size[:8].sum()
    assert assign(cost, home, dp_size=4, micro_steps=4).moved_bytes is None


@pytest.mark.parametrize("domain", [8, 2, 1])
@pytest.mark.parametrize("least", [1, 3])
def test_cells_get_images_where_there_are_enough(domain: int, least: int) -> None:
    rng = np.random.Generator(np.random.Philox(13))
    images = np.where(rng.random(96) < 0.45, rng.integers(3, 9, 96), 0)
    cost = images * rng.integers(500, 1500, 96)
    home = rng.integers(0, 2, 96)
    shape = {"dp_size": 8, "micro_steps": 4, "packs_per_cell": 3, "sync_domain": domain}
    plain = assign(cost, home, ranks_per_node=4, num_images=images, **shape)
    dealt = assign(
        cost, home, ranks_per_node=4, num_images=images, min_images_per_rank=least, **shape
    )
    assert _short(dealt, images, 8, 4, least) == 0
    assert _short(plain, images, 8, 4) > 0 or domain == 1
    assert dealt.sync <= 1.1 * plain.sync


def test_too_few_images() -> None:
    images = np.array([2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 5] + [0] * 4)
    shape = {"dp_size": 4, "micro_steps": 2, "packs_per_cell": 2}
    found = assign(images * 10, images * 0, num_images=images, min_images_per_rank=1, **shape)
    assert _short(found, images, 4, 2) == 5  # three packs have images
    one_each: dict[str, Any] = {"dp_size": 4, "micro_steps": 4, "num_images": images}
    for least in (0, 1):
        found = assign(images * 10, images * 0, min_images_per_rank=least, **one_each)
        assert _short(found, images, 4, 4) == 13


def test_arrival_order_is_evaluated() -> None:
    cost, home = _step(8, 4, 2, 14, text=0.3)
    shape = {"dp_size": 8, "micro_steps": 4, "ranks_per_node": 4}
    dealt = arrival(32, dp_size=8)
    seen = evaluate(cost, home, *dealt, size_bytes=cost, **shape)
    _check(seen, cost, home, **shape)
    assert seen.lockstep == lockstep_of(cost, *dealt, dp_size=8, micro_steps=4)
    found = assign(cost, home, **shape)
    assert seen.lockstep_bound == found.lockstep_bound < seen.lockstep
    away = home != dealt[1] // 4
    assert seen.moved_bytes == cost[away].sum()


@pytest.mark.parametrize(
    ("micro_step", "dp_rank", "match"),
    [
        ([0, 0, 0, 1], [0, 1, 1, 1], "2 cells do not hold packs_per_cell = 1 packs"),
        ([0, 0, 1, 2], [0, 1, 0, 1], r"micro_step must be within 0\.\.1"),
        ([0, 0, 1, 1], [0, 1, 0, -1], r"dp_rank must be within 0\.\.1"),
        ([0, 0, 1], [0, 1, 0, 1], "micro_step must hold 4 integers"),
    ],
)
def test_a_placement_that_is_none(micro_step: list[int], dp_rank: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        evaluate([1, 2, 3, 4], [0] * 4, micro_step, dp_rank, dp_size=2, micro_steps=2)


def test_huge_costs_and_tolerances_do_not_overflow() -> None:
    cost, home = _step(8, 4, 2, 15)
    shape = {"dp_size": 8, "micro_steps": 4, "ranks_per_node": 4}
    for domain in (8, 4):
        found = assign(cost << 30, home, tolerance=1e6, sync_domain=domain, **shape)
        small = assign(cost, home, tolerance=1e6, sync_domain=domain, **shape)
        assert np.array_equal(found.dp_rank, small.dp_rank)


def test_whole_numbers_in_floats_are_as_integers() -> None:
    cost, home = _step(8, 4, 2, 10)
    whole = assign(cost, home, dp_size=8, micro_steps=4, ranks_per_node=4)
    as_floats = assign(cost.astype(float), home, dp_size=8, micro_steps=4, ranks_per_node=4)
    assert np.array_equal(whole.dp_rank, as_floats.dp_rank)


def test_arrival_order() -> None:
    micro_step, dp_rank = arrival(12, dp_size=3, packs_per_cell=2)
    assert micro_step.tolist() == [0] * 6 + [1] * 6
    assert dp_rank.tolist() == [0, 0, 1, 1, 2, 2] * 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cost": [1, 2, 3]}, "the grid has 8"),
        ({"home": [0] * 7}, "there are 8 packs"),
        ({"home": [0.5] * 8}, "node numbers"),
        ({"cost": [1, np.nan, 1, 1, 1, 1, np.inf, -2]}, r"packs 1 \(nan\), 6 \(inf\), 7 \(-2.0\)"),
        ({"cost": ["a"] * 8}, "must hold numbers"),
        ({"cost": [1, 0.5] * 4}, r"cost must hold whole numbers .* packs 1 \(0.5\), 3 \(0.5\)"),
        ({"cost": [2**59] * 8}, r"cost adds up to 4.6\d+e\+18, .* below 2\*\*61; use a coarser"),
        ({"cost": [1, -3] * 4}, r"packs 1 \(-3\), 3 \(-3\), 5 \(-3\), 7 \(-3\)"),
        ({"num_images": [1] * 7}, "num_images has shape"),
        ({"num_images": [1] * 7 + [-1]}, r"num_images must not be negative; wrong in packs 7"),
        ({"size_bytes": [0.5] * 8}, "size_bytes has dtype float64"),
        ({"min_images_per_rank": 1}, "min_images_per_rank is 1; .* needs num_images"),
        ({"min_images_per_rank": -1}, "min_images_per_rank is -1"),
        ({"sync_domain": 3}, "sync_domain is 3, which does not divide dp_size 4"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3, which does not divide dp_size 4"),
        ({"sync_domain": 0}, "sync_domain is 0"),
        ({"packs_per_cell": 0}, "packs_per_cell is 0"),
        ({"micro_steps": 0}, "micro_steps is 0"),
        ({"packs_per_cell": 2}, "the grid has 16"),
        ({"tolerance": -0.1}, "tolerance is -0.1"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], match: str) -> None:
    arguments = {"cost": [1] * 8, "home": [0] * 8, "dp_size": 4, "micro_steps": 2}
    with pytest.raises(ValueError, match=match):
        assign(**{**arguments, **changes})
