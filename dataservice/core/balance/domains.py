"""Swaps between the cells of several sync domains, or of all rows; compiled where numba is present.

Invariants: no swap takes a domain's load, the sum of the peaks (costliest cells) of its blocks,
above the limit; every swap lowers loads or cells (`lower_peaks`) or raises the number of packs at
home (`swap_between_domains`), so the loops end. Of `Placed`, `total`, `cap` and `low` are neither
used nor kept true.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.balance.swaps import Packs, Placed
from dataservice.core.compiled import compiled

Ints = NDArray[np.int64]


class Peaks(NamedTuple):
    top: Ints
    """[micro-step, domain, 3]: the three costliest cells of each block."""
    load: Ints
    """[domain]"""
    width: int
    """Ranks of a domain."""


@compiled
def _find_top(cells: Ints, step: int, domain: int, peaks: Peaks) -> None:
    first = 0
    second = 0
    third = 0
    for rank in range(domain * peaks.width, (domain + 1) * peaks.width):
        value = cells[step, rank]
        if value > first:
            third = second
            second = first
            first = value
        elif value > second:
            third = second
            second = value
        elif value > third:
            third = value
    peaks.load[domain] += first - peaks.top[step, domain, 0]
    peaks.top[step, domain, 0] = first
    peaks.top[step, domain, 1] = second
    peaks.top[step, domain, 2] = third


@compiled
def find_peaks(placed: Placed, width: int) -> Peaks:
    steps, ranks = placed.cells.shape
    num = ranks // width
    peaks = Peaks(np.zeros((steps, num, 3), dtype=np.int64), np.zeros(num, dtype=np.int64), width)
    for step in range(steps):
        for domain in range(num):
            _find_top(placed.cells, step, domain, peaks)
    return peaks


@compiled
def _without(first: int, second: int, third: int, one: int, two: int) -> int:
    """The largest of three falling values when one that is `one` and one that is `two` go."""
    if first == one:
        return third if second == two else second
    if first == two:
        return third if second == one else second
    return first


@compiled
def _peak_after(top: Ints, step: int, domain: int, one: int, two: int, grown: int) -> int:
    """A block's costliest cell when cells of costs `one` and `two` are replaced by others, the
    costlier of which is `grown`."""
    rest = _without(top[step, domain, 0], top[step, domain, 1], top[step, domain, 2], one, two)
    return max(rest, grown)


@compiled
def _high_after(
    cells: Ints,
    top: Ints,
    load: Ints,
    width: int,
    step: int,
    rank: int,
    at: int,
    other: int,
    change: int,
) -> int:
    """The larger load of the domains of two cells, (step, rank) and (at, other), when `change` of
    cost goes from the first to the second."""
    dx = rank // width
    dy = other // width
    cell_x = int(cells[step, rank])
    cell_y = int(cells[at, other])
    if step == at and dx == dy:
        grown = max(cell_x - change, cell_y + change)
        peak = _peak_after(top, step, dx, cell_x, cell_y, grown)
        return int(load[dx] - top[step, dx, 0] + peak)
    peak_x = _peak_after(top, step, dx, cell_x, -1, cell_x - change)
    peak_y = _peak_after(top, at, dy, cell_y, -1, cell_y + change)
    if dx == dy:
        return int(load[dx] - top[step, dx, 0] + peak_x - top[at, dy, 0] + peak_y)
    return int(max(load[dx] - top[step, dx, 0] + peak_x, load[dy] - top[at, dy, 0] + peak_y))


@compiled
def _exchange(placed: Placed, cost: Ints, peaks: Peaks, step: int, a: int, at: int, b: int) -> None:
    """The packs of slot a of a micro-step and slot b of another, or the same, change places."""
    x = placed.place[step, a]
    y = placed.place[at, b]
    rank = a // placed.per_cell
    other = b // placed.per_cell
    placed.place[step, a] = y
    placed.place[at, b] = x
    placed.cells[step, rank] += cost[y] - cost[x]
    placed.cells[at, other] += cost[x] - cost[y]
    _find_top(placed.cells, step, rank // peaks.width, peaks)
    _find_top(placed.cells, at, other // peaks.width, peaks)


@compiled
def lower_peaks(placed: Placed, packs: Packs, peaks: Peaks, budget: int) -> None:
    """Lower the domains' loads by swaps between any two cells.

    A swap lowers the larger load of the two domains, most of all; or, where none does, leaves the
    load of one domain and makes the costlier of two of its cells cheaper.
    """
    steps, slots = placed.place.shape
    per_cell = placed.per_cell
    place, cells, top, load = placed.place, placed.cells, peaks.top, peaks.load
    cost, kind = packs.cost, packs.kind
    while budget > 0:
        swaps = 0
        for step in range(steps):
            for slot in range(slots):
                budget -= steps * slots
                if budget <= 0:
                    return
                x = place[step, slot]
                rank = slot // per_cell
                load_x = load[rank // peaks.width]
                best_at = -1
                best = 0
                best_fall = 0
                best_cell = 0
                for at in range(steps):
                    for other in range(slots):
                        y = place[at, other]
                        change = int(cost[x] - cost[y])
                        if change <= 0 or kind[x] != kind[y]:
                            continue
                        to = other // per_cell
                        high = _high_after(
                            cells, top, load, peaks.width, step, rank, at, to, change
                        )
                        fall = max(load_x, load[to // peaks.width]) - high
                        cell = cells[step, rank] - cells[at, to] - change
                        if fall < best_fall or (fall == best_fall and cell <= best_cell):
                            continue
                        if fall == 0 and rank // peaks.width != to // peaks.width:
                            continue
                        best_at = at
                        best = other
                        best_fall = fall
                        best_cell = cell
                if best_at >= 0:
                    _exchange(placed, packs.cost, peaks, step, slot, best_at, best)
                    swaps += 1
        if swaps == 0:
            return


@compiled
def swap_between_domains(
    placed: Placed, packs: Packs, peaks: Peaks, limit: int, passes: int, near: int
) -> None:
    """Bring packs home by swaps between cells at most `near` micro-steps apart, while every
    domain's load stays within the limit.

    Of the swaps that do the one with the largest gain is made, then that with the lowest larger
    load of the two domains.
    """
    steps, slots = placed.place.shape
    per_cell = placed.per_cell
    width = per_cell * placed.per_node
    place, cells, top, load = placed.place, placed.cells, peaks.top, peaks.load
    cost, home, kind = packs.cost, packs.home, packs.kind
    for _ in range(passes):
        swaps = 0
        for step in range(steps):
            for slot in range(slots):
                x = place[step, slot]
                target = home[x]
                node = slot // width
                rank = slot // per_cell
                if target < 0 or target == node:
                    continue
                best_at = -1
                best = 0
                best_gain = 0
                best_high = 0
                for at in range(max(0, step - near), min(steps, step + near + 1)):
                    for other in range(target * width, (target + 1) * width):
                        y = place[at, other]
                        gain = 2 if home[y] == node else 1
                        if home[y] == target or gain < best_gain or kind[x] != kind[y]:
                            continue
                        change = int(cost[x] - cost[y])
                        high = _high_after(
                            cells, top, load, peaks.width, step, rank, at, other // per_cell, change
                        )
                        if high <= limit and (gain > best_gain or high < best_high):
                            best_at = at
                            best = other
                            best_gain = gain
                            best_high = high
                if best_at >= 0:
                    _exchange(placed, packs.cost, peaks, step, slot, best_at, best)
                    swaps += 1
        if swaps == 0:
            return
