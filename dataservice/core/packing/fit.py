"""Packers with open bins: a sample goes to one of them, and one leaves when none fits.

Invariants: every sample is in exactly one pack; a bin takes a sample only when it has the room and
`within_caps` holds; an empty bin takes any sample, so no input loops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled
from dataservice.core.packing.rules import PackRules, Samples

Ints = NDArray[np.int64]


_NO_BUDGET = np.iinfo(np.int64).max


def next_fit(samples: Samples, rules: PackRules, order: Ints, offsets: Ints) -> int:
    return _fit(samples, rules.pack_length, 1, _NO_BUDGET, order, offsets)


def best_fit(samples: Samples, rules: PackRules, order: Ints, offsets: Ints) -> int:
    """A sample goes to the fitting bin with the least room; the fullest leaves when none fits."""
    return _fit(samples, rules.pack_length, rules.open_bins, _NO_BUDGET, order, offsets)


def budget_2d(samples: Samples, rules: PackRules, order: Ints, offsets: Ints) -> int:
    """Best fit with a budget of image tokens beside the room: what a full pack holds on average.

    A sample above the budget has a pack to itself; others close for want of one kind of room
    while the other is free.
    """
    tokens = int(samples.length.sum())
    images = int(samples.image_tokens.sum())
    budget = -(-images * rules.pack_length // max(tokens, 1))
    return _fit(samples, rules.pack_length, rules.open_bins, budget, order, offsets)


def nbin(samples: Samples, rules: PackRules, order: Ints, offsets: Ints) -> int:
    """The rule of a public report by Trillion Labs: v1 with image tokens as cost, v2 with ViT cost.

    A sample with images goes to the fitting bin of least cost, one without to the fitting bin with
    the fewest tokens; when none fits, the bin with the most tokens leaves.
    """
    return _open_bins(
        samples.length,
        samples.num_images > 0,
        samples.cost,
        samples.use,
        samples.caps,
        rules.pack_length,
        _NO_BUDGET,
        rules.open_bins,
        True,
        order,
        offsets,
    )


def _fit(
    samples: Samples, capacity: int, bins: int, budget: int, order: Ints, offsets: Ints
) -> int:
    return _open_bins(
        samples.length,
        samples.num_images > 0,
        samples.image_tokens,
        samples.use,
        samples.caps,
        capacity,
        budget,
        bins,
        False,
        order,
        offsets,
    )


@compiled
def within_caps(use: Ints, caps: Ints, held: Ints, sample: int) -> bool:
    """Whether a pack that holds `held` [caps] may take the sample, by `use` [N, caps].

    A sample above a cap may only go where there is none of that kind.
    """
    for k in range(len(caps)):
        if use[sample, k] > 0 and held[k] > 0 and held[k] + use[sample, k] > caps[k]:
            return False
    return True


@compiled
def _emit(first: int, after: Ints, order: Ints, position: int) -> int:
    sample = first
    while sample >= 0:
        order[position] = sample
        position += 1
        sample = after[sample]
    return position


@compiled
def _open_bins(
    length: Ints,
    with_images: NDArray[np.bool_],
    weight: Ints,
    use: Ints,
    caps: Ints,
    capacity: int,
    budget: int,
    open_bins: int,
    spread: bool,
    order: Ints,
    offsets: Ints,
) -> int:
    """No bin gets above the budget of weight but by its first sample, which closes it.

    `spread` chooses the bin by the rule of `nbin`, otherwise it is the one with the least room.
    """
    open_bins = max(1, min(open_bins, len(length)))
    room = np.full(open_bins, capacity, dtype=np.int64)
    carried = np.zeros(open_bins, dtype=np.int64)
    held = np.zeros((open_bins, len(caps)), dtype=np.int64)
    first = np.full(open_bins, -1, dtype=np.int64)
    last = np.full(open_bins, -1, dtype=np.int64)
    after = np.full(len(length), -1, dtype=np.int64)
    position = 0
    packs = 0
    for sample in range(len(length)):
        best = -1
        least = 0
        fullest = 0
        for b in range(open_bins):
            if room[b] < room[fullest]:
                fullest = b
            if room[b] < length[sample] or not within_caps(use, caps, held[b], sample):
                continue
            if first[b] >= 0 and carried[b] + weight[sample] > budget:
                continue
            value = room[b]
            if spread:
                value = carried[b] if with_images[sample] else -room[b]
            if best < 0 or value < least:
                best = b
                least = value
        if best < 0:
            best = fullest
            position = _emit(first[best], after, order, position)
            packs += 1
            offsets[packs] = position
            room[best] = capacity
            carried[best] = 0
            held[best] = 0
            first[best] = -1
        if first[best] < 0:
            first[best] = sample
        else:
            after[last[best]] = sample
        last[best] = sample
        room[best] -= length[sample]
        carried[best] += weight[sample]
        if carried[best] > budget:
            room[best] = 0
        for k in range(len(caps)):
            held[best, k] += use[sample, k]
    for b in range(open_bins):
        if first[b] >= 0:
            position = _emit(first[b], after, order, position)
            packs += 1
            offsets[packs] = position
    return packs
