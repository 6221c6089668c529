from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.balance import Assignment, arrival, assign, lockstep_of

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
    again = assign(cost, home, tolerance=tolerance, **shape)
    assert np.array_equal(found.micro_step, again.micro_step)
    assert np.array_equal(found.dp_rank, again.dp_rank)


def _placements(ranks: int, steps: int) -> Any:
    """Every way to give M packs to cells, as cell number by pack."""
    return itertools.permutations(range(ranks * steps))


@pytest.mark.parametrize(("ranks", "steps"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_against_brute_force(ranks: int, steps: int, seed: int) -> None:
    cost, home = _step(ranks, steps, ranks, seed, text=0.2)
    cells = np.array(list(_placements(ranks, steps)))
    placed = np.zeros((len(cells), ranks * steps), dtype=np.int64)
    np.put_along_axis(placed, cells, np.broadcast_to(cost, cells.shape), axis=1)
    placed = placed.reshape(-1, steps, ranks)
    lockstep = placed.max(axis=2).sum(axis=1)
    end = placed.sum(axis=1).max(axis=1)
    moved = (cells % ranks != home).sum(axis=1)

    rows = assign(cost, home, dp_size=ranks, micro_steps=steps, tolerance=0)
    assert rows.lockstep == lockstep.min() == rows.lockstep_bound
    best = lockstep == lockstep.min()
    assert rows.end_bound <= rows.end
    assert rows.moved <= moved[best & (end <= rows.end)].min() + 2

    free = assign(cost, home, dp_size=ranks, micro_steps=steps, sync_domain=1, tolerance=0)
    assert free.sync_bound <= end.min() <= free.sync <= 1.25 * end.min()


@pytest.mark.parametrize("seed", range(3))
def test_movement_reaches_its_bound_when_totals_do_not_matter(seed: int) -> None:
    cost, home = _step(16, 8, 4, seed)
    found = assign(cost, home, dp_size=16, micro_steps=8, ranks_per_node=4, tolerance=1000.0)
    assert found.moved == found.moved_bound
    assert found.lockstep == found.lockstep_bound


def test_quality_at_a_common_size() -> None:
    cost, home = _step(64, 16, 8, 1)
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
    assert found.sync <= 1.06 * found.sync_bound


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
    assert found.lockstep <= 1.08 * found.lockstep_bound
    dealt = arrival(len(cost), dp_size=16, packs_per_cell=4)
    assert found.lockstep < lockstep_of(cost, *dealt, dp_size=16, micro_steps=4)


def test_float_costs() -> None:
    cost, home = _step(8, 4, 2, 10)
    whole = assign(cost, home, dp_size=8, micro_steps=4, ranks_per_node=4)
    as_floats = assign(cost.astype(float), home, dp_size=8, micro_steps=4, ranks_per_node=4)
    assert np.array_equal(whole.dp_rank, as_floats.dp_rank)
    for scale in (1e-9, 0.1, 1e200):
        found = assign(cost * scale, home, dp_size=8, micro_steps=4, ranks_per_node=4)
        assert np.array_equal(whole.micro_step, found.micro_step)
        assert found.lockstep == pytest.approx(found.lockstep_bound, rel=1e-12)


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
