"""Placements and bounds beside exact optima: brute force, and mixed-integer programs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.balance import Assignment, assign, bounds

Ints = NDArray[np.int64]


def _step(ranks: int, steps: int, nodes: int, seed: int, *, text: float) -> tuple[Ints, Ints]:
    rng = np.random.Generator(np.random.Philox(seed))
    count = ranks * steps
    cost = (np.exp(rng.normal(0, 0.5, count)) * 1000).astype(np.int64)
    cost[rng.random(count) < text] = 0
    return cost, rng.permutation(np.arange(count) % nodes)


# ---- brute force --------------------------------------------------------------------------------


def _all_cells(ranks: int, steps: int, per_cell: int) -> Ints:
    """[placements, packs]: cell number (micro-step * ranks + rank) by pack."""
    cells = np.repeat(np.arange(ranks * steps), per_cell)
    return np.array(sorted(set(itertools.permutations(cells.tolist()))))


def _costs(cells: Ints, cost: Ints, ranks: int, steps: int) -> Ints:
    """[placements, micro-step, rank]"""
    placed = np.zeros((len(cells), ranks * steps), dtype=np.int64)
    for pack, value in enumerate(cost.tolist()):
        placed[np.arange(len(cells)), cells[:, pack]] += value
    return placed.reshape(-1, steps, ranks)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_against_every_placement(ranks: int, steps: int, seed: int) -> None:
    cost, home = _step(ranks, steps, ranks, seed, text=0.2)
    cells = np.array(list(itertools.permutations(range(ranks * steps))))
    placed = _costs(cells, cost, ranks, steps)
    lockstep = placed.max(axis=2).sum(axis=1)
    end = placed.sum(axis=1).max(axis=1)
    moved = (cells % ranks != home).sum(axis=1)

    rows = assign(cost, home, dp_size=ranks, micro_steps=steps, tolerance=0)
    assert rows.lockstep == lockstep.min() == rows.lockstep_bound
    best = lockstep == lockstep.min()
    assert rows.end_bound <= end[best].min() <= rows.end <= 1.05 * end[best].min()
    assert rows.moved <= moved[best & (end <= rows.end)].min() + 2

    free = assign(cost, home, dp_size=ranks, micro_steps=steps, sync_domain=1, tolerance=0)
    assert free.sync_bound <= end.min() <= free.sync <= 1.02 * end.min()


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(2, 2, 2), (2, 1, 3), (3, 1, 2), (1, 3, 2), (2, 2, 1), (4, 1, 2)]),
    data=st.data(),
)
def test_bounds_hold_for_every_placement(shape: tuple[int, int, int], data: st.DataObject) -> None:
    ranks, steps, k = shape
    count = ranks * steps * k
    cost = np.array(data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))
    images = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    cells = _all_cells(ranks, steps, k)
    placed = _costs(cells, cost, ranks, steps)
    lockstep = placed.max(axis=2).sum(axis=1).min()
    assert bounds.lockstep(cost, ranks, k) <= lockstep
    assert bounds.end(cost, ranks, steps * k) <= placed.sum(axis=1).max(axis=1).min()
    for domain in (d for d in range(1, ranks + 1) if ranks % d == 0):
        blocks = placed.reshape(-1, steps, ranks // domain, domain).max(axis=3)
        optimum = blocks.sum(axis=1).max(axis=1).min()
        found = assign(
            cost,
            cost * 0,
            dp_size=ranks,
            micro_steps=steps,
            sync_domain=domain,
            packs_per_cell=k,
            tolerance=0,
        )
        assert found.sync_bound <= optimum <= found.sync <= 1.25 * optimum
    short = (_costs(cells, images, ranks, steps) < 1).sum(axis=(1, 2)).min()
    dealt = assign(
        cost,
        cost * 0,
        dp_size=ranks,
        micro_steps=steps,
        packs_per_cell=k,
        num_images=images,
        min_images_per_rank=1,
    )
    held = np.zeros((steps, ranks), dtype=np.int64)
    np.add.at(held, (dealt.micro_step, dealt.dp_rank), images)
    assert (held < 1).sum() == short


# ---- mixed-integer programs ---------------------------------------------------------------------


class _Program:
    """Minimise a linear objective over 0/1 variables, the last `free` of them continuous."""

    def __init__(self, variables: int, free: int = 0) -> None:
        self.size = variables
        self.free = free
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[tuple[float, float]] = []

    def row(self, low: float, high: float, terms: Sequence[tuple[int, float]]) -> None:
        self.entries += [(len(self.limits), i, value) for i, value in terms]
        self.limits.append((low, high))

    def solve(self, objective: NDArray[np.float64]) -> float:
        """The proven optimum; skips the test where the solver does not prove one in time."""
        optimize = pytest.importorskip("scipy.optimize")
        sparse = pytest.importorskip("scipy.sparse")
        rows, columns, values = zip(*self.entries, strict=True)
        low, high = np.array(self.limits).T
        whole = np.arange(self.size) < self.size - self.free
        done = optimize.milp(
            objective,
            constraints=optimize.LinearConstraint(
                sparse.coo_matrix((values, (rows, columns)), shape=(len(low), self.size)), low, high
            ),
            integrality=whole.astype(int),
            bounds=optimize.Bounds(0, np.where(whole, 1, np.inf)),
            options={"time_limit": 20},
        )
        if done.status:
            pytest.skip(f"not proven: {done.message}")
        return float(done.fun)


def _rows_program(found: Assignment, cost: Ints, ranks: int, steps: int) -> tuple[Any, Any, Any]:
    """(program, terms of every rank's total, pack and rank of every variable): each micro-step's
    packs go to its ranks."""
    program = _Program(steps * ranks * ranks + 1, free=1)
    totals: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]
    names: list[tuple[int, int]] = []
    for step in range(steps):
        packs = np.flatnonzero(found.micro_step == step).tolist()
        number = {
            pair: len(names) + i for i, pair in enumerate(itertools.product(packs, range(ranks)))
        }
        names += list(number)
        for pack in packs:
            program.row(1, 1, [(number[pack, r], 1) for r in range(ranks)])
        for r in range(ranks):
            program.row(1, 1, [(number[pack, r], 1) for pack in packs])
            totals[r] += [(number[pack, r], float(cost[pack])) for pack in packs]
    return program, totals, names


@pytest.mark.parametrize(("ranks", "steps", "per_node"), [(4, 8, 2), (8, 4, 4), (8, 8, 2)])
@pytest.mark.parametrize(("tolerance", "allowed"), [(0.03, 4), (0.01, 8), (1000.0, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_moved_beside_the_least_at_the_same_balance(
    ranks: int, steps: int, per_node: int, tolerance: float, allowed: int, seed: int
) -> None:
    cost, home = _step(ranks, steps, ranks // per_node, seed, text=0.4 * (seed % 2))
    found = assign(
        cost, home, dp_size=ranks, micro_steps=steps, ranks_per_node=per_node, tolerance=tolerance
    )
    program, totals, names = _rows_program(found, cost, ranks, steps)
    for terms in totals:
        program.row(-np.inf, found.end + 0.5, terms)
    away = [float(home[pack] != rank // per_node) for pack, rank in names]
    least = round(program.solve(np.array([*away, 0.0])))
    assert found.moved_bound <= least <= found.moved <= least + allowed


@pytest.mark.parametrize(("ranks", "steps"), [(4, 4), (4, 6), (6, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_end_of_step_beside_the_least_of_the_same_rows(ranks: int, steps: int, seed: int) -> None:
    cost, home = _step(ranks, steps, ranks, seed, text=0.3 * (seed % 2))
    found = assign(cost, home, dp_size=ranks, micro_steps=steps, tolerance=0)
    program, totals, names = _rows_program(found, cost, ranks, steps)
    for terms in totals:
        program.row(-np.inf, 0, [*terms, (len(names), -1.0)])
    least = program.solve(np.array([0.0] * len(names) + [1.0]))
    assert found.end_bound <= least * (1 + 1e-6)
    assert least * (1 - 1e-6) <= found.end <= 1.03 * least


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("ranks", "steps", "domain", "k"),
    [(2, 3, 2, 2), (3, 2, 3, 2), (2, 2, 1, 3), (4, 2, 2, 2), (4, 3, 2, 1)],
)
def test_waiting_beside_the_least(ranks: int, steps: int, domain: int, k: int, seed: int) -> None:
    cost, home = _step(ranks, steps * k, 1, seed, text=0.4 * (seed % 2))
    found = assign(
        cost,
        home,
        dp_size=ranks,
        micro_steps=steps,
        sync_domain=domain,
        packs_per_cell=k,
        tolerance=0,
    )
    if found.sync == found.sync_bound:
        return
    num, cells = ranks // domain, ranks * steps
    peaks = len(cost) * cells
    program = _Program(peaks + steps * num + 1, free=steps * num + 1)
    for pack in range(len(cost)):
        program.row(1, 1, [(pack * cells + cell, 1) for cell in range(cells)])
    for cell in range(cells):
        held = [pack * cells + cell for pack in range(len(cost))]
        program.row(k, k, [(i, 1) for i in held])
        step, rank = divmod(cell, ranks)
        terms = [(i, float(cost[pack])) for pack, i in enumerate(held)]
        program.row(-np.inf, 0, [*terms, (peaks + step * num + rank // domain, -1)])
    for d in range(num):
        blocks = [peaks + step * num + d for step in range(steps)]
        program.row(-np.inf, 0, [(i, 1) for i in blocks] + [(program.size - 1, -1)])
        for i, j in itertools.pairwise(blocks):
            program.row(0, np.inf, [(i, 1), (j, -1)])
    least = program.solve(np.eye(1, program.size, program.size - 1)[0])
    assert found.sync_bound <= least * (1 + 1e-6)
    assert least * (1 - 1e-6) <= found.sync <= 1.06 * least
