"""The step that ranks are in as a grid of cells: planned cost as placed, and before balancing.

Invariants: both grids hold the same packs; the idle share is what ranks wait for each other in
their sync domains, by planned cost alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.actors.session import Session
from dataservice.actors.steps import ActiveStep

Ints = NDArray[np.int64]


def current_step(session: Session | None) -> ActiveStep | None:
    """Of the slowest rank; the last one that is known while the next is being planned."""
    if session is None or not session.steps:
        return None
    known = [step for step in session.steps if step <= session.done_step]
    return session.steps[max(known) if known else min(session.steps)]


def step_grid(active: ActiveStep, sync_domain: int | None) -> dict[str, Any]:
    """Lists are [micro_step][rank]; `sync_domain`: ranks that meet at every micro-step, None: all
    of them."""
    grid = active.grid
    cost = active.cells(active.cost)
    arrival = _arrival(active)
    domain = sync_domain or grid.dp_size
    return {
        "step": active.step,
        "micro_steps": grid.micro_steps,
        "dp_size": grid.dp_size,
        "sync_domain": domain,
        "cost": cost.tolist(),
        "cost_arrival": arrival.tolist(),
        "idle_share": _idle_share(cost, domain),
        "idle_share_arrival": _idle_share(arrival, domain),
        "fill": active.fill,
        "images": active.images.tolist(),
    }


def _arrival(active: ActiveStep) -> Ints:
    """The cells' cost had the packs been dealt in their order, as `core.balance.arrival` does."""
    grid, num_packs = active.grid, active.planned.settings.num_packs
    per_cell = np.repeat(np.array(num_packs, dtype=np.int64), grid.dp_size)
    cells = np.zeros(grid.micro_steps * grid.dp_size, dtype=np.int64)
    np.add.at(cells, np.repeat(np.arange(len(cells)), per_cell), active.cost)
    return cells.reshape(grid.micro_steps, grid.dp_size)


def _idle_share(cells: Ints, domain: int) -> float:
    """0..1."""
    waited_for = cells.reshape(len(cells), -1, domain).max(axis=2).sum(axis=0).max()
    if not waited_for:
        return 0.0
    return round(float(1 - cells.sum() / (waited_for * cells.shape[1])), 6)
