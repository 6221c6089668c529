"""Simulations of made-up packs, for tests of what is shown of them."""

from __future__ import annotations

import numpy as np

from dataservice.cli.simulate_run import Options, Report
from dataservice.core.settings import Grid, PlanSettings
from dataservice.core.simulate import PackTime, Scenario, Simulation, simulate
from dataservice.core.simulate.pool import PACKERS, PackPool, Packs

PACK_LENGTH = 1000


def scenario(grid: Grid, **changes: object) -> Scenario:
    values: dict[str, object] = {
        "grids": (grid,),
        "ranks_per_node": 1,
        "sync_domain": grid.dp_size,
        "tolerance": 0.0,
        "min_images_per_rank": 0,
        "node_gbits": 8.0,
        "token_bytes": 8,
        "patch_bytes": 100,
    }
    return Scenario(**{**values, **changes})  # type: ignore[arg-type]


def pool(cost: object, tokens: object = None) -> PackPool:
    costs = np.asarray(cost, dtype=np.int64)
    full = np.full(len(costs), PACK_LENGTH) if tokens is None else np.asarray(tokens)
    packs = Packs(
        tokens=full.astype(np.int64),
        image_tokens=costs.copy(),
        num_images=(costs > 0).astype(np.int64),
        num_patches=4 * costs,
        cost=costs,
    )
    return PackPool(pack_length=PACK_LENGTH, kinds=(packs,), counts={"books": {"split": 3}})


def random_pool(num_packs: int, seed: int = 0) -> PackPool:
    """Mostly text, some packs heavy."""
    rng = np.random.Generator(np.random.Philox(seed))
    cost = np.rint(rng.lognormal(4, 1.3, num_packs)) * (rng.random(num_packs) < 0.4)
    return pool(cost, rng.integers(900, PACK_LENGTH + 1, num_packs))


def random_simulation(grid: Grid, *, steps: int = 1, curve: bool = True) -> Simulation:
    pools = {
        name: random_pool(steps * grid.num_packs, seed) for seed, name in enumerate(sorted(PACKERS))
    }
    time = PackTime(pack_ms=100.0, unit_ms=1.0)
    return simulate(pools, time, scenario(grid), num_steps=steps, curve=curve)


def random_report(grid: Grid, *, workload: str = "made up") -> Report:
    return Report(
        workload=workload,
        options=Options(grid=grid),
        settings=PlanSettings(sources=(), packer="lbf"),
        simulation=random_simulation(grid),
        rows=(),
        num_phases=1,
        warnings=(),
    )
