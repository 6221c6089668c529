"""The samples a pack is filled from, shortest first, and the choice of the next one.

Invariants: integers only; among equal choices the shortest sample, then the one longest in the
pool, wins.

A pool is int64 [3, size]: length, cost and number of each sample, of which the first `count` are
present. Costs per token are fixed point, in 1 / 2**UNIT_BITS.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled
from dataservice.core.packing.fit import within_caps

Ints = NDArray[np.int64]

UNIT_BITS = 13
_MOST = np.iinfo(np.int64).max


@compiled
def _fitting(pool: Ints, count: int, room: int) -> int:
    """How many samples are at most `room` long."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if pool[0, middle] <= room:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def insert(pool: Ints, count: int, length: int, cost: int, sample: int) -> None:
    place = _fitting(pool, count, length)
    for i in range(count, place, -1):
        pool[0, i] = pool[0, i - 1]
        pool[1, i] = pool[1, i - 1]
        pool[2, i] = pool[2, i - 1]
    pool[0, place] = length
    pool[1, place] = cost
    pool[2, place] = sample


@compiled
def remove(pool: Ints, count: int, place: int) -> None:
    for i in range(place, count - 1):
        pool[0, i] = pool[0, i + 1]
        pool[1, i] = pool[1, i + 1]
        pool[2, i] = pool[2, i + 1]


@compiled
def find(pool: Ints, count: int, length: int, sample: int) -> int:
    """The sample's place, or -1."""
    place = _fitting(pool, count, length) - 1
    while place >= 0 and pool[0, place] == length:
        if pool[2, place] == sample:
            return place
        place -= 1
    return -1


@compiled
def choose(
    pool: Ints,
    count: int,
    room: int,
    need: int,
    density: int,
    price: int,
    near: int,
    use: Ints,
    caps: Ints,
    held: Ints,
) -> int:
    """Place of the sample to take into a pack with `room` left that holds `held` [caps], or -1.

    It is the one that leaves the cost `need` missing to the level nearest to what the room that
    remains will bring at `density`, each token of that room charged with `price`. From `near`
    tokens of room on, one that does this better with a second: the longest that fits beside it,
    for samples below half the room the one of about half.
    """
    best = -1
    least = _MOST
    wanted = (need << UNIT_BITS) - density * room
    fitting = _fitting(pool, count, room)
    for place in range(fitting - 1, -1, -1):
        charge = price * (room - pool[0, place])
        if charge > least:
            break
        score = abs(wanted + density * pool[0, place] - (pool[1, place] << UNIT_BITS)) + charge
        if score <= least and within_caps(use, caps, held, pool[2, place]):
            best = place
            least = score
    if best < 0 or room > near:
        return best
    fits = 0
    for place in range(fitting - 1, -1, -1):
        room_after = room - pool[0, place]
        while fits < place and pool[0, fits] <= room_after:
            fits += 1
        if fits == 0:
            continue
        left = room_after - pool[0, fits - 1]
        if price * left >= least:
            continue
        off = ((need - pool[1, place] - pool[1, fits - 1]) << UNIT_BITS) - density * left
        score = abs(off) + price * left
        if score < least and within_caps(use, caps, held, pool[2, place]):
            best = place
            least = score
    return best
