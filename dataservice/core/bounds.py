"""Lower bounds of a step's placement: what no assignment of these packs to this grid can beat.

Invariants: bounds are ints where costs are ints (means rounded up), floats otherwise; one pack a
cell and one domain make the lockstep bound exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.int64 | np.float64]


def _mean(total: float, parts: int) -> float:
    return -(-total // parts) if isinstance(total, int) else total / parts


def lockstep(cost: Costs, ranks: int, per_cell: int) -> float:
    """Sum over micro-steps of the costliest rank: the (j+1)-th largest of the micro-steps' maxima
    is at least the (j * ranks * per_cell + 1)-th largest pack, and no maximum is below its mean."""
    falling = np.sort(cost)[::-1]
    rows: float = falling[:: ranks * per_cell].sum().item()
    return max(rows, _mean(cost.sum().item(), ranks))


def end(cost: Costs, ranks: int, per_rank: int) -> float:
    """Largest rank total with `per_rank` packs each. For every k some rank holds k+1 of the
    k*ranks+1 largest packs, and per_rank-k-1 others that are no smaller than the smallest."""
    falling = np.sort(cost)[::-1]
    sums = np.concatenate([np.zeros(1, dtype=cost.dtype), np.cumsum(falling)])
    count = len(cost)
    k = np.arange(per_rank)
    k = k[k * ranks + 1 <= count]
    top = sums[k * ranks + 1] - sums[k * ranks - k]
    rest = sums[count] - sums[count - (per_rank - k - 1)]
    most: float = (top + rest).max().item()
    return max(_mean(cost.sum().item(), ranks), most)


def sync(cost: Costs, ranks: int, domain: int, steps: int, per_cell: int) -> float:
    """Largest domain's sum of its micro-steps' maxima, for domains of `domain` ranks."""
    domains = ranks // domain
    maxima = np.sort(cost)[::-1][:: domain * per_cell]
    return max(end(maxima, domains, steps), _mean(cost.sum().item(), ranks))


def end_of_rows(cells: Costs) -> float:
    """Largest rank total when micro-step g holds exactly the cells of row g, in any order."""
    low, high = cells.min(axis=1), cells.max(axis=1)
    widest: float = ((high - low).max() + low.sum()).item()
    return max(_mean(cells.sum().item(), cells.shape[1]), widest)


def moved(homes: NDArray[np.int64], nodes: int, room: int) -> int:
    """Packs that cannot stay at home when every row of `homes` has `room` places on each node."""
    excess = 0
    for row in homes:
        counts = np.bincount(row[row >= 0], minlength=nodes)
        excess += int(np.maximum(counts - room, 0).sum())
    return excess
