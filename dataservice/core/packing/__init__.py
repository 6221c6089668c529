"""Packers: a closed set of samples into packs of a fixed length, no sample cut.

Invariants: every sample is in exactly one pack; a pack's tokens never exceed the pack length, and
its image tokens, patches and images never exceed their caps, but for a single sample above a cap,
whose pack holds no other sample with any of that kind; the result depends on the arguments alone,
compiled or not.

Packs come out in an order keyed by `seed`, as a packer that starts with the largest samples must
not put them first in training.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.cost import sum_groups
from dataservice.core.order import permutation, random_words
from dataservice.core.packing.balanced import balanced
from dataservice.core.packing.fit import best_fit, budget_2d, nbin, next_fit
from dataservice.core.packing.lbf import lbf
from dataservice.core.packing.rules import Packing, PackRules, Samples, checked_samples

__all__ = ["PackRules", "Packing", "pack"]

Ints = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio

_PACKERS: dict[str, Callable[[Samples, PackRules, Ints, Ints], int]] = {
    "next_fit": next_fit,
    "best_fit": best_fit,
    "lbf": lbf,
    "budget_2d": budget_2d,
    "nbin": nbin,
    "balanced": balanced,
}
"""Each writes order [N] and offsets [N + 1] and returns the number of packs."""


def pack(
    length: ArrayLike,
    image_tokens: ArrayLike,
    num_patches: ArrayLike,
    num_images: ArrayLike,
    cost: ArrayLike,
    rules: PackRules,
    *,
    seed: int = 0,
) -> Packing:
    """Pack N samples in arrival order.

    All are integers, one-dimensional, one value a sample; lengths in tokens. `cost` is what `nbin`
    and `balanced` even out between packs; the others do not look at it. ValueError for sizes that
    differ, lengths outside 1..pack_length and negative values.
    """
    samples = checked_samples(length, image_tokens, num_patches, num_images, cost, rules)
    order = np.empty(len(samples.length), dtype=np.int64)
    offsets = np.zeros(len(samples.length) + 1, dtype=np.int64)
    count = _PACKERS[rules.packer](samples, rules, order, offsets)
    offsets = offsets[: count + 1]
    if rules.packer == "balanced":
        chosen = _spread(sum_groups(samples.cost[order], offsets), seed)
    else:
        chosen = permutation(count, seed, "packs")
    return _taken(order, offsets, chosen)


def _spread(cost: Ints, seed: int) -> Ints:
    """The order of packs of these costs: every run of packs holds its share of each range of
    costs, whatever the window's seed.

    Packs in order of cost, equal ones shuffled, are taken by a Weyl sequence of the golden ratio.
    """
    num_packs = len(cost)
    mixed = permutation(num_packs, seed, "packs")
    by_cost = mixed[np.argsort(cost[mixed], kind="stable")]
    start = random_words(1, seed, "packs start")
    places = start + np.arange(num_packs, dtype=np.uint64) * _GOLDEN
    rank = np.empty(num_packs, dtype=np.int64)
    rank[np.argsort(places, kind="stable")] = np.arange(num_packs)
    return by_cost[rank]


def _taken(order: Ints, offsets: Ints, chosen: Ints) -> Packing:
    """The packs in the order `chosen`."""
    sizes = np.diff(offsets)[chosen]
    new_offsets = np.zeros(len(offsets), dtype=np.int64)
    np.cumsum(sizes, out=new_offsets[1:])
    places = np.arange(len(order)) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], sizes)
    return Packing(order=order[places], offsets=new_offsets)
