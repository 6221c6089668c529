"""The swaps that bring packs home without spoiling the balance; compiled where numba is present.

Invariants: a swap never raises a rank total (rows) or a domain's sum (blocks) above the limit
unless it was there before, and always raises the number of packs at home, so the loops end. A unit
is the content of a cell: members[unit] are its packs, cost[unit] their sum; node = rank //
per_node. Of the swaps that keep the limit the one with the largest gain wins, then the lowest new
maximum, then the lowest rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled

Ints = NDArray[np.int64]


@compiled
def _at(unit: int, node: int, members: Ints, homes: Ints) -> int:
    """How many packs of a unit have their home on a node."""
    count = 0
    for m in range(members.shape[1]):
        if homes[members[unit, m]] == node:
            count += 1
    return count


@compiled
def _gain(x: int, y: int, node_x: int, node_y: int, members: Ints, homes: Ints) -> int:
    """Packs that come home, net, when unit x on node_x and unit y on node_y change places."""
    return (
        _at(x, node_y, members, homes)
        - _at(x, node_x, members, homes)
        + _at(y, node_x, members, homes)
        - _at(y, node_y, members, homes)
    )


@compiled
def swap_in_rows(
    place: Ints,
    cost: Ints,
    members: Ints,
    homes: Ints,
    per_node: int,
    total: Ints,
    limit: int,
    rows: Ints,
    passes: int,
) -> int:
    """Swap units of the same micro-step while both ranks' totals stay within the limit.

    Changes `place` [micro-step, rank] and `total` [rank]; visits rows in the order of `rows`.
    Returns the number of swaps.
    """
    swaps = 0
    ranks = place.shape[1]
    for _ in range(passes):
        before = swaps
        for row in rows:
            for r in range(ranks):
                x = place[row, r]
                node = r // per_node
                best = -1
                best_gain = 0
                best_high = 0
                for m in range(members.shape[1]):
                    target = homes[members[x, m]]
                    if target < 0 or target == node:
                        continue
                    for other in range(target * per_node, (target + 1) * per_node):
                        y = place[row, other]
                        gain = _gain(x, y, node, target, members, homes)
                        if gain <= 0 or gain < best_gain:
                            continue
                        change = cost[x] - cost[y]
                        high = max(total[other] + change, total[r] - change)
                        if high > limit:
                            continue
                        if gain > best_gain or high < best_high:
                            best = other
                            best_gain = gain
                            best_high = high
                if best >= 0:
                    y = place[row, best]
                    place[row, r] = y
                    place[row, best] = x
                    total[r] += cost[y] - cost[x]
                    total[best] += cost[x] - cost[y]
                    swaps += 1
        if swaps == before:
            break
    return swaps


@compiled
def _peaks(place: Ints, cost: Ints, step: int, domain: int, width: int, peaks: Ints) -> None:
    """The two largest costs of a block, into peaks[step, domain]."""
    first = 0
    second = 0
    for r in range(domain * width, (domain + 1) * width):
        value = cost[place[step, r]]
        if value > first:
            second = first
            first = value
        elif value > second:
            second = value
    peaks[step, domain, 0] = first
    peaks[step, domain, 1] = second


@compiled
def _peak_with(peaks: Ints, step: int, domain: int, leaves: int, comes: int) -> int:
    """A block's largest cost after one unit's cost is replaced by another's."""
    rest = peaks[step, domain, 0]
    if leaves == rest:
        rest = peaks[step, domain, 1]
    return rest if rest > comes else comes


@compiled
def swap_between_blocks(
    place: Ints,
    cost: Ints,
    members: Ints,
    homes: Ints,
    per_node: int,
    width: int,
    limit: int,
    passes: int,
) -> int:
    """Swap units of any two cells while the domains' sums of block maxima stay within the limit.

    Domains are `width` ranks wide. Changes `place` [micro-step, rank]; returns the number of swaps.
    """
    steps, ranks = place.shape
    peaks = np.zeros((steps, ranks // width, 2), dtype=np.int64)
    load = np.zeros(ranks // width, dtype=np.int64)
    for step in range(steps):
        for d in range(ranks // width):
            _peaks(place, cost, step, d, width, peaks)
            load[d] += peaks[step, d, 0]
    swaps = 0
    for _ in range(passes):
        before = swaps
        for step in range(steps):
            for r in range(ranks):
                x = place[step, r]
                node = r // per_node
                dx = r // width
                best_step = -1
                best_rank = -1
                best_gain = 0
                best_high = 0
                for m in range(members.shape[1]):
                    target = homes[members[x, m]]
                    if target < 0 or target == node:
                        continue
                    for cell in range(steps * per_node):
                        at_step = cell // per_node
                        other = target * per_node + cell % per_node
                        y = place[at_step, other]
                        gain = _gain(x, y, node, target, members, homes)
                        if gain <= 0 or gain < best_gain:
                            continue
                        dy = other // width
                        high = 0
                        if dx != dy or step != at_step:
                            grown_x = _peak_with(peaks, step, dx, cost[x], cost[y])
                            grown_y = _peak_with(peaks, at_step, dy, cost[y], cost[x])
                            load_x = load[dx] + grown_x - peaks[step, dx, 0]
                            load_y = load[dy] + grown_y - peaks[at_step, dy, 0]
                            if dx == dy:
                                load_x += load_y - load[dy]
                                load_y = load_x
                            high = max(load_x, load_y)
                            if high > limit:
                                continue
                        if gain > best_gain or high < best_high:
                            best_step = at_step
                            best_rank = other
                            best_gain = gain
                            best_high = high
                if best_rank >= 0:
                    dy = best_rank // width
                    load[dx] -= peaks[step, dx, 0]
                    load[dy] -= peaks[best_step, dy, 0] if dx != dy or step != best_step else 0
                    place[step, r] = place[best_step, best_rank]
                    place[best_step, best_rank] = x
                    _peaks(place, cost, step, dx, width, peaks)
                    _peaks(place, cost, best_step, dy, width, peaks)
                    load[dx] += peaks[step, dx, 0]
                    load[dy] += peaks[best_step, dy, 0] if dx != dy or step != best_step else 0
                    swaps += 1
        if swaps == before:
            break
    return swaps
