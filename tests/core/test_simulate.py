"""Waiting, speed and movement of strategies: by hand, by brute force, and on a synthetic index."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulation import PACK_LENGTH, pool, random_pool, random_simulation, scenario

from dataservice.core.settings import (
    BalanceSettings,
    Grid,
    KindShare,
    PlanSettings,
    Segregation,
    SourceShare,
)
from dataservice.core.simulate import (
    STRATEGIES,
    PackTime,
    Simulation,
    idle_share,
    simulate,
    step_times,
)
from dataservice.core.simulate.pool import PACKERS, pool_of
from dataservice.core.simulate.traffic import exposed_ms, traffic_of
from dataservice.core.simulate.workloads import MEGAPIXEL, SyntheticIndex, vision

ONE = PackTime(pack_ms=0.0, unit_ms=1.0)


def compared(cost: list[int], grid: Grid, **changes: object) -> Simulation:
    of = pool(cost)
    return simulate(
        {"lbf": of, "balanced": of},
        ONE,
        scenario(grid, **changes),
        num_steps=len(cost) // grid.num_packs,
    )


# ---- waiting ------------------------------------------------------------------------------------


def test_step_times_and_idle_shares_by_hand() -> None:
    cells = np.array([[[1.0, 5.0, 2.0, 2.0], [4.0, 1.0, 1.0, 4.0]]])  # 2 micro-steps, 4 ranks
    assert step_times(cells, 4).tolist() == [9.0]  # 5 + 4
    assert step_times(cells, 2).tolist() == [9.0]  # max(5 + 4, 2 + 4)
    assert step_times(cells, 1).tolist() == [6.0]  # max(5, 6, 3, 6)
    assert idle_share(cells, 4) == pytest.approx(1 - 20 / 4 / 9)
    assert idle_share(cells, 1) == pytest.approx(1 - 20 / 4 / 6)
    assert idle_share(np.zeros((1, 2, 4)), 4) == 0


def test_strategies_by_hand() -> None:
    # Rank 0 gets 9, 1 and rank 1 gets 1, 9 in arrival order.
    found = compared([9, 1, 1, 9], Grid(dp_size=2, micro_steps=2))
    arrival, local, two_pass, balanced = found.outcomes
    assert [o.strategy for o in found.outcomes] == ["arrival", "local", "two_pass", "balanced"]
    assert (arrival.step_ms, local.step_ms, two_pass.step_ms) == (18, 10, 10)
    assert arrival.idle_lockstep == pytest.approx(1 - 10 / 18)
    assert (arrival.idle_end, local.idle_lockstep, two_pass.idle_lockstep) == (0, 0, 0)
    assert local.gain == pytest.approx(0.8)
    assert arrival.tokens_per_s == pytest.approx(4 * PACK_LENGTH / 0.018)
    assert (balanced.packer, balanced.step_ms, balanced.gain) == ("balanced", 10, two_pass.gain)


@given(st.lists(st.integers(0, 30), min_size=6, max_size=6))
@settings(deadline=None, max_examples=40)
def test_two_pass_is_the_best_of_all_placements(cost: list[int]) -> None:
    found = compared(cost, Grid(dp_size=2, micro_steps=3))
    best = min(
        sum(max(cost[a], cost[b]) for a, b in zip(order[::2], order[1::2], strict=True))
        for order in itertools.permutations(range(6))
    )
    assert found.outcome("two_pass").step_ms == best
    for of in found.outcomes:
        assert 0 <= of.idle_end <= of.idle_lockstep < 1


@given(st.integers(0, 10_000), st.sampled_from([(4, 3, 1), (3, 2, 2), (8, 1, 1)]))
@settings(deadline=None, max_examples=25)
def test_local_reordering_keeps_every_rank_its_packs(seed: int, shape: tuple[int, ...]) -> None:
    dp_size, micro_steps, per_cell = shape
    grid = Grid(dp_size=dp_size, micro_steps=micro_steps, packs_per_cell=per_cell)
    cost = random_pool(grid.num_packs, seed).all("cost").tolist()
    found = compared(cost, grid)
    arrival, local = found.outcome("arrival"), found.outcome("local")
    assert local.idle_end == pytest.approx(arrival.idle_end)
    assert local.traffic.moved_packs == 0
    totals = found.cells_ms["arrival"].sum(axis=0)
    expected = np.array(cost).reshape(micro_steps, dp_size, per_cell).sum(axis=(0, 2))
    assert totals.tolist() == expected.tolist()


def test_equal_costs_wait_for_nothing_and_stay() -> None:
    for value in (0, 7):
        found = simulate(
            {"lbf": pool([value] * 32), "balanced": pool([value] * 32)},
            PackTime(pack_ms=0.0 if value else 5.0, unit_ms=1.0),
            scenario(Grid(dp_size=4, micro_steps=4)),
            num_steps=2,
        )
        for of in found.outcomes:
            assert (of.idle_lockstep, of.idle_end, of.gain) == pytest.approx((0, 0, 0))
            assert of.traffic.moved_packs == 0
    nothing = compared([0] * 4, Grid(dp_size=2, micro_steps=2))
    assert all(of.tokens_per_s == 0 and of.idle_lockstep == 0 for of in nothing.outcomes)


def test_the_sync_domain_decides_step_time_and_what_is_balanced() -> None:
    cost = random_pool(64).all("cost").tolist()
    grid = Grid(dp_size=8, micro_steps=8)
    for domain in (1, 2, 8):
        found = compared(cost, grid, sync_domain=domain)
        for of in found.outcomes:
            work = sum(cost) / 8
            assert of.step_ms * (1 - of.idle_sync) == pytest.approx(work)
        assert found.outcome("arrival").idle_lockstep == pytest.approx(
            compared(cost, grid).outcome("arrival").idle_lockstep
        )
    ends = [compared(cost, grid, sync_domain=d).outcome("two_pass").idle_end for d in (1, 8)]
    assert ends[0] <= ends[1] + 1e-9


def test_values_are_means_over_steps() -> None:
    costs = random_pool(32).all("cost").tolist()
    grid = Grid(dp_size=4, micro_steps=4)
    both = compared(costs, grid)
    parts = [compared(costs[:16], grid), compared(costs[16:], grid)]
    for name in ("arrival", "two_pass"):
        each = [part.outcome(name) for part in parts]
        assert both.outcome(name).step_ms == pytest.approx(np.mean([o.step_ms for o in each]))
        moved = np.mean([o.traffic.moved_packs for o in each])
        assert both.outcome(name).traffic.moved_packs == pytest.approx(moved)


# ---- movement -----------------------------------------------------------------------------------


def test_traffic_counts_what_leaves_its_node() -> None:
    found = traffic_of(
        np.array([10, 20, 30, 40]),
        np.array([0, 1, 1, 0]),  # home
        np.array([1, 1, 0, 0]),  # node
        np.array([0, 0, 1, 1]),  # micro-step
        micro_steps=2,
        num_nodes=2,
    )
    assert (found.moved_packs, found.moved_share, found.moved_bytes) == (2, 0.5, 40)
    assert found.busiest_node_bytes.tolist() == [10, 30]


def test_exposed_time_by_hand() -> None:
    compute = np.array([10.0, 10.0, 10.0])
    # At 8 Gbit/s a megabyte takes a millisecond.
    comm = np.array([3.0, 12.0, 4.0]) * 1e6
    alone, overlapped = exposed_ms(compute, comm, 8.0)
    assert alone == pytest.approx(19)
    assert overlapped == pytest.approx(3 + max(10, 12) + max(10, 4) + 10 - 30)


def test_only_between_nodes_do_packs_move() -> None:
    cost = random_pool(64, seed=3).all("cost").tolist()
    grid = Grid(dp_size=8, micro_steps=8)
    moved = {
        per_node: compared(cost, grid, ranks_per_node=per_node).outcome("two_pass").traffic
        for per_node in (1, 4, 8)
    }
    assert moved[8].moved_packs == moved[8].moved_bytes == 0
    assert 0 < moved[4].moved_packs < moved[1].moved_packs
    least = 8 * PACK_LENGTH  # bytes of a pack without images
    assert moved[4].moved_bytes >= least * moved[4].moved_packs
    two_pass = compared(cost, grid).outcome("two_pass")
    assert 0 <= two_pass.exposed_overlap_ms <= two_pass.exposed_ms
    assert two_pass.gain_exposed <= two_pass.gain_overlap <= two_pass.gain


# ---- what the plots show ------------------------------------------------------------------------


def test_plots_have_the_numbers_of_the_outcomes() -> None:
    found = random_simulation(Grid(dp_size=32, micro_steps=4))
    assert found.ranks == (8, 16, 32)
    assert list(found.idle_by_ranks) == list(STRATEGIES)
    for name, idle in found.idle_by_ranks.items():
        assert idle[-1] == pytest.approx(found.outcome(name).idle_sync)
    for packer in found.packers:
        assert packer.histogram.sum() == packer.num_packs == 128
    assert list(found.cells_ms) == ["arrival", "balanced"]
    for cells in found.cells_ms.values():
        assert cells.shape == (4, 32)


def test_ranks_are_halved_only_while_they_can_be() -> None:
    assert random_simulation(Grid(dp_size=24, micro_steps=2)).ranks == (6, 12, 24)
    assert random_simulation(Grid(dp_size=5, micro_steps=2)).ranks == (5,)
    assert random_simulation(Grid(dp_size=8, micro_steps=2), curve=False).idle_by_ranks == {}


# ---- packs of a plan ----------------------------------------------------------------------------


def synthetic(num_samples: int = 4000) -> tuple[PlanSettings, SyntheticIndex]:
    index = SyntheticIndex(
        "mostlyvl", num_samples=num_samples, pack_length=4096, max_pixels=MEGAPIXEL
    )
    sources = tuple(SourceShare(name=stats.name) for stats in index.sources)
    rules = vision(MEGAPIXEL)
    return PlanSettings(sources=sources, packer="lbf", pack_length=4096, vision=rules), index


def test_a_pool_is_the_same_however_its_steps_are_cut() -> None:
    plan, index = synthetic()
    for packer in PACKERS:
        wide = pool_of(plan, index, packer, Grid(dp_size=16, micro_steps=2), 4)
        narrow = pool_of(plan, index, packer, Grid(dp_size=4, micro_steps=2), 16)
        for name in ("tokens", "cost", "num_patches"):
            assert wide.all(name).tolist() == narrow.all(name).tolist()
        assert len(wide.kinds[0]) == 128
        assert wide.all("tokens").max() <= 4096


def test_a_pool_ends_with_the_data() -> None:
    plan, index = synthetic(300)
    grid = Grid(dp_size=8, micro_steps=2)
    ended = pool_of(plan, index, "lbf", grid, 1000)
    steps = ended.steps((grid,))
    assert 0 < steps < 1000
    assert len(ended.kinds[0]) == steps * grid.num_packs


def test_packs_do_not_depend_on_which_ranks_meet() -> None:
    plan, index = synthetic(1000)
    apart = dataclasses.replace(plan, balance=BalanceSettings(sync_domain=8))
    grid = Grid(dp_size=1, micro_steps=2)
    found, expected = (pool_of(of, index, "lbf", grid, 3) for of in (apart, plan))
    assert found.all("cost").tolist() == expected.all("cost").tolist()


def test_a_segregated_plan_has_two_kinds_of_packs() -> None:
    plan, index = synthetic(8000)
    shares = Segregation(
        text=KindShare(micro_steps=1, packs_per_cell=2), vision=KindShare(micro_steps=3)
    )
    plan = dataclasses.replace(plan, segregate=shares)
    of = pool_of(plan, index, "lbf", Grid(dp_size=4, micro_steps=4), 2)
    text, images = of.kinds
    assert (len(text), len(images)) == (2 * 4 * 2, 2 * 4 * 3)
    assert text.num_images.sum() == 0 < images.num_images.min()
    grids = (
        Grid(dp_size=4, micro_steps=1, packs_per_cell=2),
        Grid(dp_size=4, micro_steps=3),
    )
    found = simulate({"lbf": of}, ONE, scenario(grids[0], grids=grids), num_steps=2)
    assert found.cells_ms["arrival"].shape == (4, 4)
    assert found.cells_ms["arrival"][0].sum() == 0  # text costs nothing here
    assert found.outcome("two_pass").idle_lockstep <= found.outcome("arrival").idle_lockstep
