"""How much of a step's time a packing leaves unused, in integers: what `balanced` chooses by.

Invariants: exact (Python integers); of two packings of the same samples the one with the smaller
`window_time` has the larger fill x (1 - idle) under the reference grid, as far as one window can
tell.

A step of G micro-steps of R ranks holds R * G packs of many windows, sorted by cost and cut into
rows; each row takes the LLM's time and that of its costliest pack. A window's own packs stand for
the step's: row j is headed by the pack at j/G of the window's packs in falling order of cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

STRAY_PACKS = 6
"""A step holds a share of many windows, not exactly its part of every kind of pack: about so many
more or fewer of a kind than it should."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceGrid:
    ranks: int
    micro_steps: int
    ratio: Fraction
    """A pack's LLM time over the mean pack's ViT time."""

    @property
    def num_packs(self) -> int:
        return self.ranks * self.micro_steps

    def row_start(self, row: int, num_packs: int) -> int:
        """Where a row starts among a window's packs, costliest first; early by the strays."""
        start = row * self.ranks - STRAY_PACKS
        return max(0, start * num_packs // self.num_packs)


def window_time(cost: NDArray[np.int64], grid: ReferenceGrid) -> int:
    """Time of a window's packs [P] by their costs, in a unit common to all packings of its samples.

    With F = ratio * mean cost and the mean L of the rows' largest costs, P * (F + L) is to be
    small per mean cost: fill is proportional to 1 / P and 1 - idle to mean cost / (F + L).
    """
    num_packs = len(cost)
    if num_packs == 0:
        return 0
    falling = np.sort(cost)[::-1]
    heads = sum(int(falling[grid.row_start(row, num_packs)]) for row in range(grid.micro_steps))
    total = int(cost.sum())
    ratio = grid.ratio
    llm = ratio.numerator * grid.micro_steps * total
    vision = ratio.denominator * heads * num_packs
    return num_packs * (llm + vision)
