"""Fill by levels: packs in groups, as many as a row of the reference grid holds, of equal cost.

Invariants: every sample is in exactly one pack, within the room and the caps; integers only.

A row of a step waits for its costliest pack, so packs need not be equal, only equal within a row.
Single samples can cost nearly as much as the mean pack, or more; a long text keeps a pack below it.
So the costliest samples, one a pack, seed a row's worth of high packs, which the samples of highest
cost per token then fill to a level that all of them reach; where what is left still holds samples
above its mean, another row follows, at the level of the largest. The longest texts seed a row of
low packs, at a level of what the lowest of them could reach. All others are filled to the mean of
the rest, the hardest samples first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled
from dataservice.core.packing.pool import UNIT_BITS, choose, find, insert, remove

Ints = NDArray[np.int64]

POOL = 4096  # samples looked at
COST_BITS = 28  # of all costs of a window together
_NEAR = 3  # mean samples; when so much room is left, pairs are looked at


@compiled
def _next(order: Ints, place: int, pack_of: Ints) -> int:
    """The first place from `place` on whose sample is not packed."""
    while pack_of[order[place]] >= 0:
        place += 1
    return place


@compiled
def _dense_level(
    length: Ints, cost: Ints, costliest: Ints, densest: Ints, pack_of: Ints, room: int, packs: int
) -> int:
    """Mean cost of packs of the costliest samples left, one each, and the densest beside them.

    `room` is that of all packs together.
    """
    seed = np.zeros(len(length), dtype=np.bool_)
    total = 0
    found = 0
    for sample in costliest:
        if found == packs:
            break
        if pack_of[sample] < 0:
            seed[sample] = True
            found += 1
            room -= length[sample]
            total += cost[sample]
    for sample in densest:
        if pack_of[sample] < 0 and not seed[sample]:
            room -= length[sample]
            if room < 0:
                break
            total += cost[sample]
    return total // packs


@compiled
def _low_level(
    length: Ints, cost: Ints, pack_of: Ints, capacity: int, level: int, dense: int, packs: int
) -> int:
    """What the lower quarter of the lowest packs could reach with samples nearly all dense."""
    reach = np.full(len(length), level, dtype=np.int64)
    for sample in range(len(length)):
        if pack_of[sample] < 0:
            filled = (capacity - length[sample]) * dense // capacity
            reach[sample] = min(level, cost[sample] + filled * 9 // 10)
    reach.sort()
    return int(reach[packs // 4])


@compiled
def _hardest_first(length: Ints, cost: Ints, capacity: int, level: int) -> Ints:
    """By length; a sample nearly as costly as a pack by the share of the level it takes."""
    hard = length * max(level, 1)
    for sample in range(len(length)):
        if cost[sample] * 8 > level * 7:
            hard[sample] = max(hard[sample], cost[sample] * capacity)
    return np.argsort(-hard, kind="mergesort")


@compiled
def _high_level(
    length: Ints,
    cost: Ints,
    costliest: Ints,
    densest: Ints,
    pack_of: Ints,
    capacity: int,
    packs: int,
    mean: int,
    first: bool,
) -> tuple[int, int]:
    """(level of the next high group, the mean for none; what its packs can reach).

    The first group rises from the mean to what it can reach as the sample at a quarter of its
    packs, costliest first, goes from half to three quarters of the mean: gradually, as windows
    must agree. A later one is at the level of the costliest sample left.
    """
    reached = _dense_level(length, cost, costliest, densest, pack_of, packs * capacity, packs)
    if first:
        mark = cost[costliest[packs // 4]]
        rise = max(0, min(mean, 4 * mark - 2 * mean))
        return mean + max(0, reached - mean) * rise // max(mean, 1), reached
    largest = cost[costliest[_next(costliest, 0, pack_of)]]
    if (largest - mean) * 20 <= mean:
        return mean, reached
    return max(mean, min(reached, largest)), reached


@compiled
def _fill_pack(
    length: Ints,
    cost: Ints,
    use: Ints,
    caps: Ints,
    pool: Ints,
    waiting: int,
    seed: int,
    pack: int,
    capacity: int,
    level: int,
    price: int,
    near: int,
    pack_of: Ints,
) -> tuple[int, int, int, int]:
    """(samples, tokens and cost the pack took, samples left in the pool)"""
    held = np.zeros(len(caps), dtype=np.int64)
    density = (level << UNIT_BITS) // capacity
    room = capacity
    need = level
    taken = 0
    sample = seed
    place = find(pool, waiting, length[seed], seed)
    while sample >= 0:
        if place >= 0:
            remove(pool, waiting, place)
            waiting -= 1
        pack_of[sample] = pack
        taken += 1
        room -= length[sample]
        need -= cost[sample]
        for k in range(len(caps)):
            held[k] += use[sample, k]
        place = choose(pool, waiting, room, need, density, price, near, use, caps, held)
        sample = pool[2, place] if place >= 0 else -1
    return taken, capacity - room, level - need, waiting


@compiled
def fill_levels(
    length: Ints,
    cost: Ints,
    use: Ints,
    caps: Ints,
    capacity: int,
    ends: Ints,
    low: int,
    pack_of: Ints,
    group_of: Ints,
) -> int:
    """Number of packs; writes `pack_of` [N] and, by pack, `group_of` [N], groups counted from 0.

    `ends`: packs up to the end of each high group there may be; `low`: packs of the low group, 0
    for none. The sum of the costs is below 2**COST_BITS and above 0.
    """
    count = len(length)
    tokens = int(np.sum(length))
    total = int(np.sum(cost))
    price = (total << UNIT_BITS) // tokens * 5 // 8
    near = tokens * _NEAR // count
    costliest = np.argsort(-cost, kind="mergesort")
    densest = np.argsort(-((cost << UNIT_BITS) // length), kind="mergesort")
    pool = np.empty((3, POOL), dtype=np.int64)
    pack_of[:] = -1
    arrived, waiting, placed, packs = 0, 0, 0, 0
    group, group_end = -1, 0
    high, lowered = len(ends) > 0, low == 0
    dense, level = 0, 0
    seeds, next_seed = costliest, 0
    while placed < count:
        if packs == group_end:
            group += 1
            group_end = count
            mean = min(total, total * capacity // tokens)
            level = mean
            next_seed = 0
            if high:
                row = ends[group] - packs
                level, reached = _high_level(
                    length, cost, costliest, densest, pack_of, capacity, row, mean, group == 0
                )
                if group == 0:
                    dense = reached
                high = level > mean
                if high:
                    seeds, group_end = costliest, ends[group]
                    high = group + 1 < len(ends)
            if group_end == count and not lowered:
                lowered = True
                reach = _low_level(length, cost, pack_of, capacity, mean, dense, low)
                if reach * 32 < mean * 31:
                    level, group_end = reach, packs + low
                    seeds = np.argsort(cost * tokens - length * total, kind="mergesort")
            if group_end == count:
                seeds = _hardest_first(length, cost, capacity, level)
        while waiting < POOL and arrived < count:
            if pack_of[arrived] < 0:
                insert(pool, waiting, length[arrived], cost[arrived], arrived)
                waiting += 1
            arrived += 1
        if group_end == count:
            level = min(total, total * capacity // tokens)
        next_seed = _next(seeds, next_seed, pack_of)
        taken, its_tokens, its_cost, waiting = _fill_pack(
            length,
            cost,
            use,
            caps,
            pool,
            waiting,
            seeds[next_seed],
            packs,
            capacity,
            level,
            price,
            near,
            pack_of,
        )
        group_of[packs] = group
        placed += taken
        tokens -= its_tokens
        total -= its_cost
        packs += 1
    return packs
