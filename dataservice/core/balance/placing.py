"""Passes 2 and 3 of balancing: blocks get ranks, totals are evened out, packs are brought home.

Invariants: with one domain a row keeps its packs, so what pass 1 found for the sum of the rows'
costliest cells holds; with several packs a cell swaps between cells of a row may raise it, by the
tolerance at most. Rank totals (one domain) or domains' sums (several) end within the tolerance of
their bound, or of what was found without regard to homes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dataservice.core.balance import bounds
from dataservice.core.balance.blocks import Step, blocks
from dataservice.core.balance.domains import find_peaks, lower_peaks, swap_between_domains
from dataservice.core.balance.evening import even_out
from dataservice.core.balance.swaps import Packs, Placed, swap_in_rows

Ints = NDArray[np.int64]

_PASSES = 4
_NEAR = 8
_SMALL = 512  # packs of a step


def away(held: Ints, step: Step) -> NDArray[np.bool_]:
    """[micro-step, rank, packs per cell], as `held`: whether a pack's home is another node."""
    node = np.arange(step.ranks) // step.per_node
    home = step.home[held]
    not_here: NDArray[np.bool_] = (home >= 0) & (home != node[None, :, None])
    return not_here


def _limit(bound: int, found: int, tolerance: Fraction) -> int:
    """What balance may fall back to: the tolerance above the bound, or above what was found where
    that is more, yet not above twice the tolerance if that was found."""

    def above(value: int, share: Fraction) -> int:
        return min(value + math.floor(value * share), 2**62)

    within, twice = above(bound, tolerance), above(bound, 2 * tolerance)
    if found <= within:
        return within
    loose = above(found, tolerance)
    return min(loose, twice) if found <= twice else loose


def _best(groupings: Iterable[Ints], packs: Packs, step: Step) -> tuple[Ints, int]:
    """Of groupings [micro-step, rank, packs per cell] the one with the fewest cells short of
    images, then the lowest largest load of a domain; and that load.

    In small steps swaps of single packs lower the loads first, where sorting has not done so.
    """
    found = []
    for content in groupings:
        placed = _placed(content, step.cost[content].sum(axis=2), step, Fraction(0))
        peaks = find_peaks(placed, step.domain)
        sorted_rows = step.num_domains == step.per_cell == 1
        if len(step.cost) <= _SMALL and not sorted_rows:
            lower_peaks(placed, packs, peaks, step.budget // 2)
        held = placed.place.reshape(content.shape)
        found.append((step.short_cells(held), int(peaks.load.max()), held))
    _, load, best = min(found, key=lambda one: one[:2])
    return best, load


# ---- one domain: rows ---------------------------------------------------------------------------


def place_rows(step: Step, tolerance: Fraction) -> Ints:
    """[micro-step, rank, packs per cell] pack numbers."""
    packs = Packs(cost=step.cost, home=step.home, kind=step.kinds())
    groupings = blocks(step)
    content = next(groupings) if step.per_cell == 1 else _best(groupings, packs, step)[0]
    if step.ranks == 1:  # only the order of its micro-steps is open
        return content[np.argsort(step.cost[content].sum(axis=(1, 2)), kind="stable")]
    nodes = step.ranks // step.per_node
    least = bounds.moved(
        step.home[content.reshape(step.steps, -1)], nodes, step.per_node * step.per_cell
    )
    found = []
    for placed, rising, limit in _starts(content, packs, step, tolerance):
        held = placed.place.reshape(content.shape)
        moved = away(held, step).sum(axis=(1, 2))
        for reach in (1, 3) if len(step.cost) <= _SMALL else (0, 1, 2):
            if moved.sum() > least:
                swap_in_rows(placed, packs, limit, rising, _PASSES, reach, step.budget)
                moved = away(held, step).sum(axis=(1, 2))
        ordered = held[np.lexsort((np.arange(step.steps), moved, placed.cells.max(axis=1)))]
        found.append((int(moved.sum()), int(placed.total.max()), ordered))
    return min(found, key=lambda one: one[:2])[2]


def _starts(
    content: Ints, packs: Packs, step: Step, tolerance: Fraction
) -> Iterator[tuple[Placed, Ints, int]]:
    """Placements to bring packs home from, the order to visit rows in, the limit of totals.

    Cells dealt near home, where that stays within the limit or can be evened out; otherwise, and
    in small steps beside it, cells dealt for the totals alone.
    """
    cells = step.cost[content].sum(axis=2)
    spread = _by_spread(cells)
    first = _first_row(int(spread[0]), cells, content, step)
    bound = bounds.end_of_rows(cells)
    column, found = _dealt(cells, spread, first, bound, step.budget)
    limit = _limit(bound, found, tolerance)
    rising = spread[::-1].copy()
    small = len(step.cost) <= _SMALL
    near_home = False
    homed = bool((step.home >= 0).any())
    for share in _shares(tolerance, small=small, homed=homed):
        placed = _placed(content, cells, step, tolerance)
        _deal_near_home(placed, packs, content, cells, spread, first, share, homed=homed)
        if int(placed.total.max()) > limit:
            _even_rows(placed, limit, step.budget)
        if int(placed.total.max()) <= limit:
            near_home = True
            yield placed, rising, limit
    if small or not near_home:
        content = np.take_along_axis(content, column[:, :, None], axis=1)
        cells = np.take_along_axis(cells, column, axis=1)
        yield _placed(content, cells, step, tolerance), rising, limit


def _shares(tolerance: Fraction, *, small: bool, homed: bool) -> tuple[int, ...]:
    """To deal near home with; where no pack has a home all of them give the same placement."""
    if not tolerance:
        return ()
    return (1, 2, 4, 8) if small and homed else (2,)


def _placed(content: Ints, cells: Ints, step: Step, tolerance: Fraction) -> Placed:
    peaks = cells.max(axis=1).tolist()
    over, whole = tolerance.numerator, tolerance.denominator
    return Placed(
        place=content.reshape(step.steps, -1).copy(),
        cells=cells.copy(),
        total=cells.sum(axis=0),
        cap=np.array([min(p + p * over // whole, 2**62) for p in peaks], dtype=np.int64),
        low=step.cost[content].min(axis=(1, 2)),
        per_cell=step.per_cell,
        per_node=step.per_node,
    )


def _by_spread(costs: Ints) -> Ints:
    """Rows of `costs` by falling difference between their largest and smallest."""
    return np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable")


def _deal(costs: Ints, rows: Ints, first: Ints) -> Ints:
    """column[row, slot]: which item of each row goes to which slot, one of every row to each slot.

    Rows are dealt in the order of `rows`, the first as given, of the others the costliest item to
    the slot with the smallest total.
    """
    falling = np.argsort(-costs, axis=1, kind="stable")
    column = np.empty_like(costs)
    column[rows[0]] = first
    total = costs[rows[0]][first]
    for row in rows[1:]:
        column[row, np.argsort(total, kind="stable")] = falling[row]
        total = total + costs[row][column[row]]
    return column


def _dealt(costs: Ints, rows: Ints, first: Ints, bound: int, budget: int) -> tuple[Ints, int]:
    """`_deal`, evened out, and the largest total."""
    base = np.arange(len(costs))[:, None] * costs.shape[1]
    items = _deal(costs, rows, first) + base
    flat = costs.ravel()
    total = flat[items].sum(axis=0)
    even_out(items, flat, np.zeros_like(flat), total, bound, True, budget)
    return items - base, int(total.max())


def _even_rows(placed: Placed, limit: int, budget: int) -> None:
    """Lower rank totals to the limit by swaps of whole cells of a row."""
    shape = placed.cells.shape
    flat = placed.cells.ravel().copy()
    items = np.arange(flat.size).reshape(shape)
    even_out(items, flat, np.zeros_like(flat), placed.total, limit, True, budget)
    placed.cells[:] = flat[items]
    placed.place[:] = placed.place.reshape(flat.size, -1)[items].reshape(placed.place.shape)


def _deal_near_home(
    placed: Placed,
    packs: Packs,
    content: Ints,
    cells: Ints,
    rows: Ints,
    first: Ints,
    share: int,
    *,
    homed: bool,
) -> None:
    """`_deal` into `placed`, each row's packs brought home at once as long as no total exceeds the
    mean by more than the spread of the next row divided by `share`, which can make up for it.
    `homed`: whether any pack has a home."""
    placed.total[:] = 0
    for i, row in enumerate(rows.tolist()):
        column = first
        if i:
            column = np.empty_like(first)
            column[np.argsort(placed.total, kind="stable")] = np.argsort(-cells[row], kind="stable")
        placed.place[row] = content[row, column].ravel()
        placed.cells[row] = cells[row, column]
        placed.total[:] += placed.cells[row]
        if homed and i and i + 1 < len(rows):
            next_row = cells[rows[i + 1]]
            spare = (int(next_row.max()) - int(next_row.min())) // share
            mean = int(placed.total.sum()) // len(first)
            limit = max(int(placed.total.max()), mean + spare)
            swap_in_rows(placed, packs, limit, rows[i : i + 1], 2, 0, len(packs.cost))


def _first_row(row: int, cells: Ints, content: Ints, step: Step) -> Ints:
    """Cells of a row by rank: to a free rank of the node of its first pack while there is one."""
    free = [list(range(n, n + step.per_node)) for n in range(0, step.ranks, step.per_node)]
    node_of = step.home[content[row, :, 0]].tolist()
    at = np.full(step.ranks, -1, dtype=np.int64)
    rest = []
    for item in np.argsort(-cells[row], kind="stable").tolist():
        node = node_of[item]
        if node >= 0 and free[node]:
            at[free[node].pop(0)] = item
        else:
            rest.append(item)
    at[at < 0] = rest
    return at


# ---- several domains: blocks --------------------------------------------------------------------


def place_blocks(step: Step, tolerance: Fraction) -> Ints:
    """[micro-step, rank, packs per cell] pack numbers."""
    packs = Packs(cost=step.cost, home=step.home, kind=step.kinds())
    groupings = (_in_domains(content, step) for content in blocks(step))
    content, found = _best(groupings, packs, step)
    bound = bounds.sync(step.cost, step.ranks, step.domain, step.steps, step.per_cell)
    limit = _limit(bound, found, tolerance)
    placed = _placed(content, step.cost[content].sum(axis=2), step, tolerance)
    peaks = find_peaks(placed, step.domain)
    swap_between_domains(placed, packs, peaks, limit, _PASSES, _NEAR)
    shape = (step.steps, step.num_domains, step.domain)
    rising = np.argsort(placed.cells.reshape(shape).max(axis=2), axis=0, kind="stable")
    held = placed.place.reshape(*shape, step.per_cell)
    ordered = np.take_along_axis(held, rising[:, :, None, None], axis=0)
    return ordered.reshape(content.shape)


def _in_domains(content: Ints, step: Step) -> Ints:
    """[micro-step, rank, packs per cell] of blocks: each domain's by rising peak."""
    peaks = step.cost[content].sum(axis=2).max(axis=1)
    block = _domains(peaks, step)
    rising = np.argsort(peaks[block], axis=0, kind="stable")
    by_step = content[np.take_along_axis(block, rising, axis=0)]
    return by_step.reshape(step.steps, step.ranks, step.per_cell)


def _domains(peaks: Ints, step: Step) -> Ints:
    """block[micro-step, domain] with a low largest sum of a domain, the better of two rules.

    Costliest block to the lightest domain with a free micro-step suits few costly blocks; rows of
    one block for each domain suit peaks that differ little. Swaps even out either.
    """
    falling = np.argsort(-peaks, kind="stable")
    slots: list[list[int]] = [[] for _ in range(step.num_domains)]
    loads = [(0, 0, d) for d in range(step.num_domains)]
    for block, peak in zip(falling.tolist(), peaks[falling].tolist(), strict=True):
        load, used, domain = heapq.heappop(loads)
        slots[domain].append(block)
        if used + 1 < step.steps:
            heapq.heappush(loads, (load + peak, used + 1, domain))
    free = np.array(slots, dtype=np.int64).T
    rows = falling.reshape(step.steps, step.num_domains)
    costs = peaks[rows]
    column = _deal(costs, _by_spread(costs), np.arange(step.num_domains, dtype=np.int64))
    target = -(-int(peaks.sum()) // step.num_domains)
    ways = []
    for items in (free.copy(), np.take_along_axis(rows, column, axis=1)):
        load = peaks[items].sum(axis=0)
        even_out(items, peaks, np.zeros_like(peaks), load, target, False, step.budget)
        ways.append((items, int(load.max())))
    return min(ways, key=lambda way: way[1])[0]
