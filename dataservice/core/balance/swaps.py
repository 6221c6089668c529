"""The swaps that bring packs home without spoiling the balance; compiled where numba is present.

Invariants: a placement within the limit stays within it; every swap, or pair of swaps, raises the
number of packs at home, so the loops end; `budget` bounds the work in comparisons, which keeps
results independent of the machine. `place` [micro-step, slot] holds pack numbers, slot // per_cell
is the rank and slot // (per_cell * per_node) the node. Packs of different `kind` never change
places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled

Ints = NDArray[np.int64]

_EVENING = 1 << 19  # comparisons of one pass over the nodes


class Packs(NamedTuple):
    """int64 [M] each."""

    cost: Ints
    home: Ints
    kind: Ints


class Placed(NamedTuple):
    """A placement and its sums, which swaps keep true."""

    place: Ints
    """[micro-step, slot]"""
    cells: Ints
    """[micro-step, rank]"""
    total: Ints
    """[rank]"""
    cap: Ints
    """[micro-step]: what a cell may cost."""
    low: Ints
    """[micro-step]: the cheapest pack."""
    per_cell: int
    per_node: int


@compiled
def _gain(home: Ints, x: int, y: int, node_x: int, node_y: int) -> int:
    """Packs that come home, net, when x on node_x and y on node_y change places."""
    return (
        int(home[x] == node_y)
        - int(home[x] == node_x)
        + int(home[y] == node_x)
        - int(home[y] == node_y)
    )


@compiled
def _exchange(placed: Placed, packs: Packs, step: int, a: int, b: int) -> None:
    """The packs of two slots of a micro-step change places."""
    x = placed.place[step, a]
    y = placed.place[step, b]
    change = packs.cost[x] - packs.cost[y]
    placed.place[step, a] = y
    placed.place[step, b] = x
    rank_a = a // placed.per_cell
    rank_b = b // placed.per_cell
    placed.cells[step, rank_a] -= change
    placed.cells[step, rank_b] += change
    placed.total[rank_a] -= change
    placed.total[rank_b] += change


@compiled
def _cells_fit(placed: Placed, step: int, rank_a: int, rank_b: int, change: int) -> bool:
    """Whether both cells keep the cap when `change` of cost goes from rank_a to rank_b."""
    larger = max(placed.cells[step, rank_a] - change, placed.cells[step, rank_b] + change)
    return placed.per_cell == 1 or int(larger) <= int(placed.cap[step])


@compiled
def _relieve(
    placed: Placed, packs: Packs, over: int, limit: int, lose: int, first: int, last: int
) -> int:
    """Have rank `over` within the limit by one swap with a rank of first..last-1.

    Of the swaps that send at most `lose` packs from home, negative where they bring some home, the
    one that sends fewest, then that with the lowest larger total. Returns comparisons made,
    negative where no swap was found.
    """
    place, total, low = placed.place, placed.total, placed.low
    cost, home, kind = packs.cost, packs.home, packs.kind
    per_cell, per_node = placed.per_cell, placed.per_node
    node = over // per_node
    need = int(total[over]) - limit
    best_step = -1
    best_a = 0
    best_b = 0
    best_lose = lose + 1
    best_high = 0
    work = 1
    for step in range(place.shape[0]):
        for a in range(over * per_cell, (over + 1) * per_cell):
            x = place[step, a]
            if cost[x] - low[step] < need:
                continue
            work += (last - first) * per_cell
            for b in range(first * per_cell, last * per_cell):
                rank = b // per_cell
                if total[rank] > limit - need or rank == over:
                    continue
                y = place[step, b]
                change = cost[x] - cost[y]
                if change < need or total[rank] + change > limit or kind[x] != kind[y]:
                    continue
                if not _cells_fit(placed, step, over, rank, change):
                    continue
                loss = -_gain(home, x, y, node, rank // per_node)
                high = max(total[over] - change, total[rank] + change)
                if loss < best_lose or (loss == best_lose and best_step >= 0 and high < best_high):
                    best_step = step
                    best_a = a
                    best_b = b
                    best_lose = loss
                    best_high = high
    if best_step < 0:
        return -work
    _exchange(placed, packs, best_step, best_a, best_b)
    return work


@compiled
def _home_directly(placed: Placed, packs: Packs, step: int, slot: int, limit: int) -> bool:
    """Swap the pack of a slot with one on its home node, within the limit: the largest gain, then
    the lowest larger total."""
    per_cell = placed.per_cell
    width = per_cell * placed.per_node
    x = placed.place[step, slot]
    home = packs.home[x]
    rank = slot // per_cell
    best = -1
    best_gain = 0
    best_high = 0
    for other in range(home * width, (home + 1) * width):
        y = placed.place[step, other]
        gain = 2 if packs.home[y] == slot // width else 1
        if packs.home[y] == home or gain < best_gain or packs.kind[x] != packs.kind[y]:
            continue
        change = packs.cost[x] - packs.cost[y]
        to = other // per_cell
        high = max(placed.total[to] + change, placed.total[rank] - change)
        if high > limit or not _cells_fit(placed, step, rank, to, change):
            continue
        if gain > best_gain or high < best_high:
            best = other
            best_gain = gain
            best_high = high
    if best >= 0:
        _exchange(placed, packs, step, slot, best)
    return best >= 0


@compiled
def _home_with_relief(
    placed: Placed, packs: Packs, step: int, slot: int, limit: int, reach: int
) -> int:
    """Bring the pack of a slot home by two swaps that gain together, the second with either of the
    ranks of the first. Returns as `_relieve`."""
    per_cell = placed.per_cell
    width = per_cell * placed.per_node
    x = placed.place[step, slot]
    home = packs.home[x]
    rank = slot // per_cell
    work = 0
    for other in range(home * width, (home + 1) * width):
        y = placed.place[step, other]
        gain = 1
        if packs.home[y] == home:
            gain = 0
        elif packs.home[y] == slot // width:
            gain = 2
        change = packs.cost[x] - packs.cost[y]
        to = other // per_cell
        if (gain == 0 and reach < 3) or packs.kind[x] != packs.kind[y]:
            continue
        if not _cells_fit(placed, step, rank, to, change):
            continue
        _exchange(placed, packs, step, slot, other)
        for over in (to, rank):
            if placed.total[to + rank - over] > limit:
                continue
            first = 0 if reach > 1 else over // placed.per_node * placed.per_node
            last = len(placed.total) if reach > 1 else first + placed.per_node
            done = _relieve(placed, packs, over, limit, gain - 1, first, last)
            if done > 0:
                return work + done
            work -= done
        _exchange(placed, packs, step, slot, other)
    return -work - 1


@compiled
def _even_nodes(placed: Placed, packs: Packs, width: int, budget: int) -> int:
    """Among every `width` ranks, from the fullest on: lower the larger total of two ranks by swaps
    that send no pack from home, on the whole. Returns comparisons made."""
    work = 0
    for first in range(0, len(placed.total), width):
        falling = first + np.argsort(-placed.total[first : first + width], kind="mergesort")
        for rank in falling:
            for _ in range(4):
                below = int(placed.total[rank]) - 1
                done = _relieve(placed, packs, rank, below, 0, first, first + width)
                work += abs(done)
                if done < 0 or work > budget:
                    break
    return work


@compiled
def swap_in_rows(
    placed: Placed, packs: Packs, limit: int, steps: Ints, passes: int, reach: int, budget: int
) -> None:
    """Bring packs home by swaps inside micro-steps while totals stay within the limit.

    Visits micro-steps in the order of `steps`. `reach` 0: single swaps; 1: also pairs of swaps,
    the second inside a node; 2: the second between any ranks; 3: also pairs of which the first
    alone gains nothing, cycles of three packs among them.
    """
    node_slots = placed.per_cell * placed.per_node
    for _ in range(passes):
        swaps = 0
        if reach > 0:
            width = placed.per_node if reach < 3 else len(placed.total)
            budget -= _even_nodes(placed, packs, width, min(budget // 4, _EVENING))
        for step in steps:
            for slot in range(placed.place.shape[1]):
                home = packs.home[placed.place[step, slot]]
                if home < 0 or home == slot // node_slots:
                    continue
                if budget <= 0:
                    return
                budget -= node_slots
                if _home_directly(placed, packs, step, slot, limit):
                    swaps += 1
                elif reach > 0:
                    work = _home_with_relief(placed, packs, step, slot, limit, reach)
                    swaps += int(work > 0)
                    budget -= abs(work)
        if swaps == 0:
            return
