"""A step's packs put on its grid: each stream's on its own micro-steps, text before vision.

Invariants: a permutation of the packs over the cells; ranks go through one stream's micro-steps
after the other's, so what they wait for in micro-steps adds up over streams, and so does its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.balance import Assignment, arrival, assign, evaluate, lockstep_of
from dataservice.core.cursor import Cursor
from dataservice.core.packspec import TOKEN_BYTES
from dataservice.core.plan.walk import TakenPacks, joined
from dataservice.core.settings import Grid, PlanSettings
from dataservice.core.tables import StepPlan

Ints = NDArray[np.int64]


def place_step(
    *,
    cursor: Cursor,
    next_cursor: Cursor,
    grid: Grid,
    kind_grids: Sequence[Grid],
    packs: Sequence[TakenPacks],
    first_packs: Sequence[int],
    phase: int,
    pack_length: int,
    lane_home: Ints,
    settings: PlanSettings,
    ranks_per_node: int,
    given_up: Ints,
) -> StepPlan:
    """`packs[i]` fill `kind_grids[i]`, padding at their end (lane -1)."""
    placed: list[Assignment] = []
    micro_steps: list[Ints] = []
    first_step = 0
    for part, shape in zip(packs, kind_grids, strict=True):
        found = _placed(part, shape, _homes(part, lane_home), pack_length, settings, ranks_per_node)
        placed.append(found)
        micro_steps.append(found.micro_step + first_step)
        first_step += shape.micro_steps
    taken = joined(packs)
    cells = np.zeros((grid.micro_steps, grid.dp_size), dtype=np.int64)
    dp_rank = np.concatenate([found.dp_rank for found in placed])
    micro_step = np.concatenate(micro_steps)
    np.add.at(cells, (micro_step, dp_rank), taken.cost)
    mean = -(-int(cells.sum()) // grid.dp_size)
    columns: dict[str, Any] = {of.name: getattr(taken, of.name) for of in fields(taken)}
    return StepPlan(
        step=cursor.step,
        grid=grid,
        cursor=cursor,
        next_cursor=next_cursor,
        phase=phase,
        pack_length=pack_length,
        pack_number=_numbers(packs, first_packs),
        **columns,
        home=_homes(taken, lane_home),
        micro_step=micro_step,
        dp_rank=dp_rank,
        lockstep_cost=sum(found.lockstep for found in placed),
        lockstep_bound=sum(found.lockstep_bound for found in placed),
        lockstep_arrival=sum(
            _arrival_cost(part.cost, shape) for part, shape in zip(packs, kind_grids, strict=True)
        ),
        sync_cost=_domain_cost(cells, settings.balance.sync_domain or grid.dp_size),
        sync_bound=max(mean, *(found.sync_bound for found in placed)),
        end_cost=int(cells.sum(axis=0).max()),
        end_bound=max(mean, *(found.end_bound for found in placed)),
        moved=sum(found.moved for found in placed),
        moved_bound=sum(found.moved_bound for found in placed),
        moved_bytes=sum(found.moved_bytes or 0 for found in placed),
        moved_bytes_bound=sum(found.moved_bytes_bound or 0 for found in placed),
        given_up=given_up,
    )


def _placed(
    packs: TakenPacks,
    grid: Grid,
    home: Ints,
    pack_length: int,
    settings: PlanSettings,
    ranks_per_node: int,
) -> Assignment:
    balance = settings.balance
    step: dict[str, Any] = {
        "dp_size": grid.dp_size,
        "micro_steps": grid.micro_steps,
        "ranks_per_node": ranks_per_node,
        "sync_domain": balance.sync_domain,
        "packs_per_cell": grid.packs_per_cell,
        "size_bytes": TOKEN_BYTES * pack_length + settings.vision.patch_bytes * packs.num_patches,
    }
    if not balance.enabled:
        dealt = arrival(grid.num_packs, dp_size=grid.dp_size, packs_per_cell=grid.packs_per_cell)
        return evaluate(packs.cost, home, *dealt, **step)
    return assign(
        packs.cost,
        home,
        tolerance=balance.tolerance,
        num_images=packs.num_images,
        min_images_per_rank=balance.min_images_per_rank,
        **step,
    )


def _domain_cost(cells: Ints, domain: int) -> int:
    """Largest sum, over sync domains, of the costliest of their `cells` [micro-step, rank]."""
    return int(cells.reshape(len(cells), -1, domain).max(axis=2).sum(axis=0).max())


def _arrival_cost(cost: Ints, grid: Grid) -> int:
    dealt = arrival(grid.num_packs, dp_size=grid.dp_size, packs_per_cell=grid.packs_per_cell)
    return lockstep_of(cost, *dealt, dp_size=grid.dp_size, micro_steps=grid.micro_steps)


def _homes(packs: TakenPacks, lane_home: Ints) -> Ints:
    """-1 for padding."""
    known: Ints = np.append(lane_home, -1)[packs.lane]
    return known


def _numbers(packs: Sequence[TakenPacks], first_packs: Sequence[int]) -> Ints:
    """Of all packs of the plan in the order of steps: a stream's after those of the streams before
    it in the same step."""
    real = joined(packs).lane >= 0
    numbers = sum(first_packs) + np.cumsum(real) - 1
    return np.where(real, numbers, -1)
