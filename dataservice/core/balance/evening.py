"""Bins of equal numbers of items made even by swaps; compiled where numba is present.

Invariants: every swap lowers the largest load, or the number of bins that have it, so the loop
ends; `budget` bounds the work in comparisons, which keeps results independent of the machine;
items of different `kind` never change places. Of equally good swaps the first found is made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled

Ints = NDArray[np.int64]


@compiled
def even_out(
    place: Ints, cost: Ints, kind: Ints, load: Ints, target: int, aligned: bool, budget: int
) -> None:
    """Lower the largest load to the target by swaps between the fullest bin and another.

    place [slot, bin] holds items, load [bin] the sums of their costs. `aligned`: items keep their
    slot. Of all swaps the one with the lowest larger load of the two bins is made, of one item for
    one, or where none helps of two for two; ends where neither helps.
    """
    slots, bins = place.shape
    two = bins * (slots**2 if aligned else slots**4)
    found = np.zeros(5, dtype=np.int64)
    while budget > 0:
        full = int(np.argmax(load))
        if load[full] <= target:
            return
        budget -= bins + _find_swap(place, cost, kind, load, full, aligned, found)
        if found[0] < 0:
            if two > budget:
                return
            budget -= _find_pair(place, cost, kind, load, full, aligned, found)
            if found[0] < 0:
                return
        other = found[0]
        for i in range(1, 5, 2):
            if found[i] < 0:
                continue
            x = place[found[i], full]
            y = place[found[i + 1], other]
            place[found[i], full] = y
            place[found[i + 1], other] = x
            load[full] += cost[y] - cost[x]
            load[other] += cost[x] - cost[y]


@compiled
def _find_swap(
    place: Ints, cost: Ints, kind: Ints, load: Ints, full: int, aligned: bool, found: Ints
) -> int:
    """The best swap of one item, into found = (other bin, slot, its slot, -1, -1); other bin -1
    where none helps. Returns comparisons made."""
    slots, bins = place.shape
    best = load[full]
    found[:] = -1
    work = 0
    lightest = int(np.argmin(load))
    for i in range(-1, bins):
        other = lightest if i < 0 else i
        if (load[full] + load[other] + 1) // 2 >= best:
            continue
        work += slots if aligned else slots * slots
        for a in range(slots):
            x = place[a, full]
            for b in range(a if aligned else 0, a + 1 if aligned else slots):
                y = place[b, other]
                change = cost[x] - cost[y]
                if change <= 0 or kind[x] != kind[y]:
                    continue
                high = max(load[full] - change, load[other] + change)
                if high < best:
                    best = high
                    found[0] = other
                    found[1] = a
                    found[2] = b
    return work


@compiled
def _find_pair(
    place: Ints, cost: Ints, kind: Ints, load: Ints, full: int, aligned: bool, found: Ints
) -> int:
    """The same of two items: the first pair of slots, then the second."""
    slots, bins = place.shape
    best = load[full]
    found[:] = -1
    work = 0
    for other in range(bins):
        if (load[full] + load[other] + 1) // 2 >= best:
            continue
        for a in range(slots):
            for b in range(a if aligned else 0, a + 1 if aligned else slots):
                first = cost[place[a, full]] - cost[place[b, other]]
                if kind[place[a, full]] != kind[place[b, other]]:
                    continue
                work += a if aligned else a * slots
                for c in range(a):
                    for d in range(c if aligned else 0, c + 1 if aligned else slots):
                        x = place[c, full]
                        y = place[d, other]
                        change = first + cost[x] - cost[y]
                        if change <= 0 or b == d or kind[x] != kind[y]:
                            continue
                        high = max(load[full] - change, load[other] + change)
                        if high < best:
                            best = high
                            found[0] = other
                            found[1] = a
                            found[2] = b
                            found[3] = c
                            found[4] = d
    return work
