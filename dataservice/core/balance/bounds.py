"""Lower bounds of a step's placement: what no assignment of these packs to this grid can beat.

Invariants: integers only, means rounded up; one pack a cell and one domain make the lockstep bound
exact. `domain` is the number of ranks that meet at
every micro-step, a block the packs that one domain holds in one micro-step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def _means(totals: Ints, parts: Ints | int) -> Ints:
    means: Ints = -(-totals // parts)
    return means


def _sums(costs: Ints) -> Ints:
    """[len + 1]: sums of the first 0, 1, ... costs."""
    sums = np.zeros(len(costs) + 1, dtype=np.int64)
    np.cumsum(costs, out=sums[1:])
    return sums


def peaks(sums: Ints, domain: int, per_cell: int) -> Ints:
    """[blocks]: the least that the largest, second largest, ... block maximum can be.

    `sums` are those of the packs by falling cost. All but j blocks hold at least n - j * domain *
    per_cell of the n largest packs; where that is more than m for each of their cells, one cell
    holds m + 1 of them, and per_cell - m - 1 that are no smaller than the smallest packs.
    """
    count = len(sums) - 1
    num = count // (domain * per_cell)
    j = np.arange(num)
    least = np.zeros(num, dtype=np.int64)
    for m in range(per_cell):
        n = j * domain * per_cell + m * (num - j) * domain + 1
        rest = sums[count] - sums[count - (per_cell - m - 1)]
        np.maximum(least, sums[n] - sums[n - m - 1] + rest, out=least)
    return np.asarray(np.maximum.accumulate(least[::-1])[::-1])


def lockstep(cost: Ints, ranks: int, per_cell: int) -> int:
    """Sum over micro-steps of the costliest rank: `peaks` of the first t micro-steps, and the mean
    of what does not fit into them, for the best t."""
    return _all_peaks(_sums(np.sort(cost)[::-1]), ranks, per_cell)


def _all_peaks(sums: Ints, domain: int, per_cell: int) -> int:
    """Sum of all block maxima."""
    first = _sums(peaks(sums, domain, per_cell))
    rest = _means(sums[-1] - sums[:: domain * per_cell], domain)
    return int((first + rest).max())


def end(cost: Ints, ranks: int, per_rank: int) -> int:
    """Largest rank total with `per_rank` packs each, the largest of three bounds.

    The mean. For every k some rank holds k + 1 of the k * ranks + 1 largest packs, and per_rank - k
    - 1 others that are no smaller than the smallest. For every t some t ranks hold the t largest
    packs, and t * (per_rank - 1) others; one of them has the mean of that.
    """
    sums = _sums(np.sort(cost)[::-1])
    count = len(cost)
    k = np.arange(per_rank)
    k = k[k * ranks + 1 <= count]
    top = sums[k * ranks + 1] - sums[k * ranks - k]
    rest = sums[count] - sums[count - (per_rank - k - 1)]
    most = int((top + rest).max())
    t = np.arange(1, ranks + 1)
    shared = _means(sums[t] + sums[count] - sums[count - t * (per_rank - 1)], t)
    return max(most, int(shared.max()))


def sync(cost: Ints, ranks: int, domain: int, steps: int, per_cell: int) -> int:
    """Largest domain's sum of its micro-steps' maxima, for domains of `domain` ranks."""
    domains = ranks // domain
    sums = _sums(np.sort(cost)[::-1])
    shared = -(-_all_peaks(sums, domain, per_cell) // domains)
    return max(shared, end(peaks(sums, domain, per_cell), domains, steps))


def end_of_rows(cells: Ints) -> int:
    """Largest rank total when micro-step g holds exactly the cells of row g, in any order.

    For every t and g the ranks of row g's t largest cells hold t cells of every other row, no
    smaller than its t smallest: one of those ranks has the mean of that. And `end` holds for what
    cells cost above the smallest of their row.
    """
    rising = np.sort(cells, axis=1)
    t = np.arange(1, cells.shape[1] + 1)
    all_low = rising.sum(axis=0).cumsum()
    held = all_low - rising.cumsum(axis=1) + rising[:, ::-1].cumsum(axis=1)
    shared = int(_means(held, t).max())
    least = rising[:, :1].copy()
    np.subtract(rising, least, out=rising)
    above = end(rising.ravel(), cells.shape[1], len(cells))
    return max(shared, int(least.sum()) + above)


def moved(homes: Ints, nodes: int, room: int) -> int:
    """Packs that cannot stay at home when every row of `homes` has `room` places on each node."""
    rows, _ = at = np.nonzero(homes >= 0)
    counts = np.bincount(rows * nodes + homes[at], minlength=len(homes) * nodes)
    return int(np.maximum(counts - room, 0).sum())


def moved_bytes(homes: Ints, size_bytes: Ints, nodes: int, room: int) -> int:
    """Bytes of those packs at least: the smallest of each row and home."""
    least = 0
    if not (homes >= 0).any():
        return least
    for row, sizes in zip(homes, size_bytes, strict=True):
        rising = np.lexsort((sizes, row))
        sums = _sums(sizes[rising])
        starts = np.searchsorted(row[rising], np.arange(nodes + 1))
        excess = np.maximum(np.diff(starts) - room, 0)
        least += int((sums[starts[:-1] + excess] - sums[starts[:-1]]).sum())
    return least
