"""The grid of a step as the planner placed it, against the planner's own sums."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.demo_config import demo_config

from dataservice.actors.plan_messages import StepRequest
from dataservice.actors.planner import Planner
from dataservice.actors.step_grid import current_step, step_grid
from dataservice.actors.steps import ActiveStep
from dataservice.core.settings import Grid, KindShare, Segregation, SourceShare


def first_step(folder: Path, *, segregate: bool) -> ActiveStep:
    config = demo_config(folder)
    if segregate:
        text, vision = KindShare(micro_steps=1, packs_per_cell=2), KindShare(micro_steps=3)
        names = ("text", "caption", "multi")
        sources = tuple(SourceShare(name=name, weight="1") for name in names)
        kinds = Segregation(text=text, vision=vision)
        plan = dataclasses.replace(config.plan, segregate=kinds, sources=sources, epochs=None)
        config = dataclasses.replace(config, plan=plan)
    grid = Grid(dp_size=4, micro_steps=4, packs_per_cell=1 if segregate else 2)
    planner = Planner(config)
    try:
        start = planner.info().start
        sizes = dataclasses.asdict(grid)
        planned = planner.step(StepRequest(cursor=start, **sizes))
    finally:
        planner.close()
    return ActiveStep(start, planned, grid, patch_bytes=3 * 14 * 14)


def lockstep(cells: list[list[int]]) -> int:
    return sum(max(row) for row in cells)


@pytest.mark.parametrize("segregate", [False, True])
def test_both_grids_hold_the_packs_as_the_plan_counts_them(tmp_path: Path, segregate: bool) -> None:
    active = first_step(tmp_path, segregate=segregate)
    grid = step_grid(active, None)
    planned = active.planned
    assert lockstep(grid["cost"]) == planned.lockstep_cost
    assert lockstep(grid["cost_arrival"]) == planned.lockstep_arrival > planned.lockstep_cost
    assert np.sum(grid["cost"]) == np.sum(grid["cost_arrival"]) == active.cost.sum() > 0
    assert np.sum(grid["images"]) == active.num_images.sum() > 0
    assert grid["idle_share"] == pytest.approx(
        1 - active.cost.sum() / (4 * planned.lockstep_cost), abs=1e-6
    )
    assert 0 < grid["idle_share"] < grid["idle_share_arrival"] < 1
    assert 0.5 < grid["fill"] <= 1.0


def test_ranks_that_meet_in_small_domains_wait_less(tmp_path: Path) -> None:
    active = first_step(tmp_path, segregate=False)
    shares = [step_grid(active, domain)["idle_share_arrival"] for domain in (1, 2, 4)]
    assert shares == sorted(shares)
    totals = np.array(step_grid(active, 1)["cost_arrival"]).sum(axis=0)
    assert shares[0] == pytest.approx(1 - totals.mean() / totals.max(), abs=1e-6)


def test_the_step_is_the_one_of_the_slowest_rank() -> None:
    def session(done_step: int, *steps: int) -> Any:
        return SimpleNamespace(done_step=done_step, steps={step: step for step in steps})

    assert current_step(None) is None
    assert current_step(session(3)) is None
    assert current_step(session(3, 2, 3, 4, 5)) == 3  # type: ignore[comparison-overlap]
    assert current_step(session(6, 4, 5)) == 5  # type: ignore[comparison-overlap]
    assert current_step(session(0, 1, 2)) == 1  # type: ignore[comparison-overlap]
