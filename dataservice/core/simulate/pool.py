"""The first packs of a plan as each packer makes them, for comparing packers on the same data.

Invariants: a pure function of (index, settings, packer, grid); only whole steps are taken, in
global pack order, so a shorter pool is the beginning of a longer one. A segregated plan has packs
of two kinds, text before vision; any other plan has one kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import Plan
from dataservice.core.plan.check import kind_grids
from dataservice.core.settings import BalanceSettings, Grid, PlanSettings
from dataservice.core.tables import IndexView

Ints = NDArray[np.int64]

PACKERS: dict[str, dict[str, Any]] = {
    "next_fit": {"packer": "next_fit"},
    "best_fit": {"packer": "best_fit"},
    "budget_2d": {"packer": "budget_2d"},
    "nbin_v1": {"packer": "nbin", "nbin_balance": "image_tokens"},
    "nbin_v2": {"packer": "nbin", "nbin_balance": "vit_cost"},
    "lbf": {"packer": "lbf"},
    "balanced": {"packer": "balanced"},
}
"""Name -> what it sets in PlanSettings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """The first packs of one kind in global order, int64 [N] each."""

    tokens: Ints
    image_tokens: Ints
    num_images: Ints
    num_patches: Ints
    cost: Ints

    def __len__(self) -> int:
        return len(self.cost)

    def part(self, first: int, stop: int) -> Packs:
        return Packs(**{f.name: getattr(self, f.name)[first:stop] for f in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPool:
    """What one packer made of the first samples of a plan."""

    pack_length: int
    kinds: tuple[Packs, ...]
    counts: Mapping[str, Mapping[str, int]]
    """Source -> reason of REASONS -> samples, of the windows that begin in it."""

    def steps(self, grids: Sequence[Grid]) -> int:
        """How many steps of such grids, one a kind, it can fill."""
        return min(len(p) // grid.num_packs for p, grid in zip(self.kinds, grids, strict=True))

    def all(self, name: str) -> Ints:
        """A column of all kinds."""
        return np.concatenate([getattr(packs, name) for packs in self.kinds])

    def first(self, grids: Sequence[Grid], num_steps: int) -> PackPool:
        """The packs of the first steps; `counts` stays that of all."""
        return dataclasses.replace(
            self,
            kinds=tuple(
                packs.part(0, num_steps * grid.num_packs)
                for packs, grid in zip(self.kinds, grids, strict=True)
            ),
        )


def pool_of(
    settings: PlanSettings, index: IndexView, packer: str, grid: Grid, num_steps: int
) -> PackPool:
    """What a packer of PACKERS makes of the plan's first steps; fewer steps if the data ends."""
    plan = Plan(
        dataclasses.replace(
            settings,
            **PACKERS[packer],
            remainder="drop",
            balance=BalanceSettings(enabled=False),
        ),
        index,
    )
    sizes = [kind.num_packs for kind in kind_grids(plan.settings, grid)]
    ends = np.cumsum(sizes)
    parts: list[list[Packs]] = [[] for _ in sizes]
    counts: dict[str, dict[str, int]] = {}
    cursor = plan.start()
    for _ in range(num_steps):
        step = plan.step(cursor, grid)
        if step is None:
            break
        cursor = step.next_cursor
        columns = Packs(**{f.name: getattr(step, f.name) for f in fields(Packs)})
        for kind, (stop, size) in enumerate(zip(ends, sizes, strict=True)):
            parts[kind].append(columns.part(stop - size, stop))
        for source, reasons in plan.counts_in(step).items():
            of = counts.setdefault(source, {})
            for reason, count in reasons.items():
                of[reason] = of.get(reason, 0) + count
    return PackPool(
        pack_length=settings.pack_length,
        kinds=tuple(joined(packs) for packs in parts),
        counts=counts,
    )


def joined(parts: Sequence[Packs]) -> Packs:
    none = np.zeros(0, dtype=np.int64)
    return Packs(
        **{
            f.name: np.concatenate([none, *(getattr(part, f.name) for part in parts)])
            for f in fields(Packs)
        }
    )
