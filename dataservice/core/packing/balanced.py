"""Balanced packing: packs filled by levels and evened out by swaps, or `lbf` where that is better.

Invariants: by the estimate of goodput.py never of lower goodput than `lbf`; with no cost anywhere
it is `lbf`; integers only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import sum_groups
from dataservice.core.packing.goodput import ReferenceGrid, window_time
from dataservice.core.packing.lbf import lbf
from dataservice.core.packing.levels import COST_BITS, fill_levels
from dataservice.core.packing.rules import PackRules, Samples
from dataservice.core.packing.swaps import swap_towards

Ints = NDArray[np.int64]

_MARGIN = 512  # one part in so many of the time, the least gain that the estimate can tell
_HIGH_SHARE = 4  # at most one row in so many is a high group
_LEAST = 4  # packs of a group in a window


def balanced(samples: Samples, rules: PackRules, order: Ints, offsets: Ints) -> int:
    """Number of packs; writes order [N] and offsets [N + 1]."""
    count = lbf(samples, rules, order, offsets)
    total = int(samples.cost.sum())
    if total == 0:
        return count
    grid = ReferenceGrid(
        ranks=rules.reference_ranks,
        micro_steps=rules.reference_micro_steps,
        ratio=rules.ratio,
    )
    cost = samples.cost >> max(0, total.bit_length() - COST_BITS)
    levelled, bounds = _levelled(samples, cost, rules, grid)
    present = window_time(sum_groups(cost[order], offsets[: count + 1]), grid)
    time = window_time(sum_groups(cost[levelled], bounds), grid)
    if time + present // _MARGIN >= present:
        return count
    order[:] = levelled
    offsets[: len(bounds)] = bounds
    return len(bounds) - 1


def _levelled(
    samples: Samples, cost: Ints, rules: PackRules, grid: ReferenceGrid
) -> tuple[Ints, Ints]:
    """(order, offsets)"""
    count = len(cost)
    capacity = rules.pack_length
    pack_of = np.empty(count, dtype=np.int64)
    group_of = np.empty(count, dtype=np.int64)
    ends, low = _group_sizes(-(-int(samples.length.sum()) // capacity), grid)
    num_packs = fill_levels(
        samples.length, cost, samples.use, samples.caps, capacity, ends, low, pack_of, group_of
    )
    order = np.argsort(pack_of, kind="stable").astype(np.int64, copy=False)
    offsets = np.zeros(num_packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(pack_of, minlength=num_packs), out=offsets[1:])
    target = _targets(sum_groups(cost[order], offsets), group_of[:num_packs])
    by_length = np.argsort(samples.length, kind="stable")
    place_of = np.empty(count, dtype=np.int64)
    place_of[by_length] = np.arange(count)
    places = place_of[order]
    swap_towards(
        target,
        samples.length[by_length],
        cost[by_length],
        samples.use[by_length],
        samples.caps,
        capacity,
        places,
        offsets,
    )
    return by_length[places], offsets


def _group_sizes(num_packs: int, grid: ReferenceGrid) -> tuple[Ints, int]:
    """(where each high group ends, packs of the low group); too small a row has no groups.

    A step must not hold more high packs than its rows do, nor fewer low ones.
    """
    rows = max(1, grid.micro_steps // _HIGH_SHARE) if grid.micro_steps > 1 else 0
    ends = [grid.row_start(row, num_packs) for row in range(1, rows + 1)]
    if not ends or ends[0] < _LEAST:
        return np.zeros(0, dtype=np.int64), 0
    low = num_packs - grid.row_start(grid.micro_steps - 1, num_packs) + 2
    return np.array(ends, dtype=np.int64), low


def _targets(cost: Ints, group: Ints) -> Ints:
    """[packs]: the mean cost of its group; of the first halfway from there to its largest."""
    target = np.empty(len(cost), dtype=np.int64)
    last = int(group.max())
    for number in range(last + 1):
        members = group == number
        level = int(cost[members].sum()) // int(members.sum())
        if number == 0 and last > 0:
            level = (level + int(cost[members].max())) // 2
        target[members] = level
    return target
