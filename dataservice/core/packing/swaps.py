"""Swaps: two samples of about equal length change packs where that evens out the packs' costs.

Invariants: every swap strictly lowers the sum of squared deviations of the packs' costs from their
targets; room and caps are kept; integers only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled

Ints = NDArray[np.int64]


_NEIGHBOURS = 32  # samples looked at on either side, in order of length
_FAR = 1024  # the same for packs far above their targets, which few others can relieve
_SWAPS = 16  # of a pack
_CLOSE = 256  # a pack off by at most one part in so many of its target is left alone


@compiled
def _allowed(use: Ints, caps: Ints, held: Ints, leaving: int, coming: int) -> bool:
    """Whether a pack that holds `held` [caps] may swap; above a cap it may only get lighter."""
    for k in range(len(caps)):
        change = use[coming, k] - use[leaving, k]
        if change > 0 and held[k] + change > caps[k]:
            return False
    return True


@compiled
def _best_swap(
    pack: int,
    reach: int,
    order: Ints,
    offsets: Ints,
    length: Ints,
    cost: Ints,
    use: Ints,
    caps: Ints,
    pack_of: Ints,
    room: Ints,
    off: Ints,
    held: Ints,
) -> tuple[int, int]:
    """(sample of the pack, sample of another), or (-1, -1)."""
    mine = -1
    other = -1
    most = 0
    above_lowest = off[pack] - off.min()
    above_highest = off[pack] - off.max()
    for slot in range(offsets[pack], offsets[pack + 1]):
        a = order[slot]
        falling = min(cost[a], above_lowest // 2)
        rising = above_highest // 2
        if max(falling * (above_lowest - falling), rising * (above_highest - rising)) <= most:
            continue
        for step in (1, -1):
            last = min(a + reach, len(length) - 1) if step > 0 else max(a - reach, 0)
            for b in range(a + step, last + step, step):
                longer = length[b] - length[a]
                if longer > room[pack]:
                    break
                partner = pack_of[b]
                if -longer > room[partner] or partner == pack:
                    continue
                change = cost[a] - cost[b]
                gain = change * (off[pack] - off[partner] - change)
                if (
                    gain > most
                    and _allowed(use, caps, held[pack], a, b)
                    and _allowed(use, caps, held[partner], b, a)
                ):
                    most = gain
                    mine = a
                    other = b
    return mine, other


@compiled
def swap_towards(
    target: Ints,
    length: Ints,
    cost: Ints,
    use: Ints,
    caps: Ints,
    capacity: int,
    order: Ints,
    offsets: Ints,
) -> None:
    """Changes `order` in place; `target` [packs] is the cost each pack should have.

    `length` does not fall from sample to sample.
    """
    num_packs = len(target)
    pack_of = np.empty(len(length), dtype=np.int64)
    slot_of = np.empty(len(length), dtype=np.int64)
    room = np.full(num_packs, capacity, dtype=np.int64)
    off = -target
    held = np.zeros((num_packs, len(caps)), dtype=np.int64)
    for pack in range(num_packs):
        for slot in range(offsets[pack], offsets[pack + 1]):
            sample = order[slot]
            pack_of[sample] = pack
            slot_of[sample] = slot
            room[pack] -= length[sample]
            off[pack] += cost[sample]
            for k in range(len(caps)):
                held[pack, k] += use[sample, k]
    for pack in np.argsort(-np.abs(off), kind="mergesort"):
        for _ in range(_SWAPS):
            if abs(off[pack]) * _CLOSE <= target[pack]:
                break
            reach = _FAR if off[pack] * 50 > target[pack] else _NEIGHBOURS
            a, b = _best_swap(
                pack, reach, order, offsets, length, cost, use, caps, pack_of, room, off, held
            )
            if a < 0:
                break
            partner = pack_of[b]
            longer = length[b] - length[a]
            room[pack] -= longer
            room[partner] += longer
            off[pack] += cost[b] - cost[a]
            off[partner] += cost[a] - cost[b]
            for k in range(len(caps)):
                held[pack, k] += use[b, k] - use[a, k]
                held[partner, k] += use[a, k] - use[b, k]
            order[slot_of[a]] = b
            order[slot_of[b]] = a
            slot_of[a], slot_of[b] = slot_of[b], slot_of[a]
            pack_of[a] = partner
            pack_of[b] = pack
