"""Packers: a closed set of samples into packs of a fixed length, no sample cut.

Invariants: every sample is in exactly one pack; a pack's tokens never exceed the pack length and
its image tokens never exceed the cap, but for a single sample above the cap, whose pack holds no
other image; the result depends on the arguments alone, compiled or not.

Fill on windows of 4,096 shuffled samples with a mean of a sixth of a pack: `lbf` 99.9 %, `best_fit`
99.5 %, `next_fit` 85 %. Packs come out in an order keyed by `seed`, as `lbf` leaves its fullest
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.compiled import compiled
from dataservice.core.order import permutation

DEFAULT_OPEN_BINS = 32
_SEARCH = 64  # lengths looked at: for a pair that fills the pack, and for images under the cap

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Pack k holds samples order[offsets[k]:offsets[k+1]]."""

    order: NDArray[np.int64]
    """Sample numbers, a permutation of 0..N-1."""
    offsets: NDArray[np.int64]
    """int64 [num_packs + 1], strictly increasing."""

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1


def pack(
    length: ArrayLike,
    image_tokens: ArrayLike,
    cost: ArrayLike,
    *,
    pack_length: int,
    packer: str,
    seed: int = 0,
    **limits: int | None,
) -> Packing:
    """Pack N samples in arrival order; `packer` is "next_fit", "best_fit" or "lbf".

    `length`, `image_tokens` (tokens) and `cost` are one-dimensional, one value a sample; these
    packers do not look at `cost`. Limits: `image_token_cap` (None = none) and `open_bins`
    (best_fit, default 32). ValueError for sizes that differ, lengths outside 1..pack_length,
    negative image tokens, an unknown packer or limit.
    """
    if packer not in _PACKERS:
        raise ValueError(f"packer is {packer!r}; known packers: {', '.join(sorted(_PACKERS))}")
    cap, open_bins = _limits(limits)
    lengths, images = _columns(length, image_tokens, cost, pack_length)
    order = np.empty(len(lengths), dtype=np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    count = _PACKERS[packer](lengths, images, pack_length, cap, open_bins, order, offsets)
    return _shuffled(order, offsets[: count + 1], seed)


def _limits(limits: dict[str, int | None]) -> tuple[int, int]:
    unknown = sorted(set(limits) - {"image_token_cap", "open_bins"})
    if unknown:
        raise ValueError(f"unknown limit {unknown[0]!r}; known limits: image_token_cap, open_bins")
    cap = limits.get("image_token_cap")
    open_bins = limits.get("open_bins", DEFAULT_OPEN_BINS)
    if cap is not None and cap < 1:
        raise ValueError(f"image_token_cap is {cap}; it must be at least 1, or None for no cap")
    if open_bins is None or open_bins < 1:
        raise ValueError(f"open_bins is {open_bins}; it must be at least 1")
    return (-1 if cap is None else int(cap)), int(open_bins)


def _columns(
    length: ArrayLike, image_tokens: ArrayLike, cost: ArrayLike, pack_length: int
) -> tuple[Ints, Ints]:
    raw_length, raw_images, raw_cost = (np.asarray(v) for v in (length, image_tokens, cost))
    if raw_length.ndim != 1 or not raw_length.shape == raw_images.shape == raw_cost.shape:
        raise ValueError(
            "length, image_tokens and cost must be one-dimensional and equally long, "
            f"got shapes {raw_length.shape}, {raw_images.shape} and {raw_cost.shape}"
        )
    for name, values in (("length", raw_length), ("image_tokens", raw_images)):
        if values.size and values.dtype.kind not in "iu":
            raise ValueError(f"{name} has dtype {values.dtype}; it must hold integers")
    lengths = np.ascontiguousarray(raw_length, dtype=np.int64)
    images = np.ascontiguousarray(raw_images, dtype=np.int64)
    bad = np.flatnonzero((lengths < 1) | (lengths > pack_length))
    if bad.size:
        raise ValueError(
            f"sample {bad[0]} has length {lengths[bad[0]]}; lengths must be in 1..{pack_length} "
            "(split or drop longer samples, drop empty ones)"
        )
    negative = np.flatnonzero(images < 0)
    if negative.size:
        raise ValueError(f"sample {negative[0]} has image_tokens {images[negative[0]]}, below 0")
    return lengths, images


def _shuffled(order: Ints, offsets: Ints, seed: int) -> Packing:
    num_packs = len(offsets) - 1
    chosen = permutation(num_packs, seed, "packs")
    sizes = np.diff(offsets)[chosen]
    new_offsets = np.zeros(num_packs + 1, dtype=np.int64)
    np.cumsum(sizes, out=new_offsets[1:])
    places = np.arange(len(order)) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], sizes)
    return Packing(order=order[places], offsets=new_offsets)


# ---- best fit -----------------------------------------------------------------------------------


@compiled
def _emit(first: int, after: Ints, order: Ints, position: int) -> int:
    sample = first
    while sample >= 0:
        order[position] = sample
        position += 1
        sample = after[sample]
    return position


@compiled
def _best_fit(
    length: Ints,
    images: Ints,
    capacity: int,
    cap: int,
    open_bins: int,
    order: Ints,
    offsets: Ints,
) -> int:
    """A sample goes to the fitting bin with the least room; the fullest leaves when none fits."""
    room = np.full(open_bins, capacity, dtype=np.int64)
    held_images = np.zeros(open_bins, dtype=np.int64)
    first = np.full(open_bins, -1, dtype=np.int64)
    last = np.full(open_bins, -1, dtype=np.int64)
    after = np.full(len(length), -1, dtype=np.int64)
    position = 0
    packs = 0
    for sample in range(len(length)):
        need = length[sample]
        img = images[sample]
        best = -1
        fullest = 0
        for b in range(open_bins):
            if room[b] < room[fullest]:
                fullest = b
            if room[b] >= need and (best < 0 or room[b] < room[best]):
                if cap < 0 or img == 0 or held_images[b] == 0 or held_images[b] + img <= cap:
                    best = b
        if best < 0:
            best = fullest
            position = _emit(first[best], after, order, position)
            packs += 1
            offsets[packs] = position
            room[best] = capacity
            held_images[best] = 0
            first[best] = -1
        if first[best] < 0:
            first[best] = sample
        else:
            after[last[best]] = sample
        last[best] = sample
        room[best] -= need
        held_images[best] += img
    for b in range(open_bins):
        if first[b] >= 0:
            position = _emit(first[b], after, order, position)
            packs += 1
            offsets[packs] = position
    return packs


def _next_fit(
    length: Ints,
    images: Ints,
    capacity: int,
    cap: int,
    open_bins: int,  # noqa: ARG001 - one signature for all packers
    order: Ints,
    offsets: Ints,
) -> int:
    return _best_fit(length, images, capacity, cap, 1, order, offsets)


# ---- length-bucketed fill -----------------------------------------------------------------------
#
# Samples wait in FIFO buckets by (kind, length). Kind 1 are samples with images when there is a
# cap, kind 0 all others. `down[kind, l]` leads to the largest non-empty length at or below l (0:
# none), as a union-find with path halving: buckets only ever become empty, so no search repeats.


@compiled
def _at_most(down: Ints, kind: int, length: int) -> int:
    while down[kind, length] != length:
        down[kind, length] = down[kind, down[kind, length]]
        length = down[kind, length]
    return length


@compiled
def _image_at_most(
    down: Ints, head: Ints, images: Ints, length: int, held: int, cap: int, search: int
) -> int:
    """The same among samples with images, of those whose oldest fits under the cap."""
    found = _at_most(down, 1, length)
    for _ in range(search):
        if found == 0 or held == 0 or held + images[head[1, found]] <= cap:
            return found
        found = _at_most(down, 1, found - 1)
    return 0


@compiled
def _usable(
    down: Ints,
    head: Ints,
    images: Ints,
    length: int,
    held: int,
    cap: int,
    search: int,
    images_first: bool,
) -> int:
    """The largest length at or below `length` from which a sample may be taken; 0 for none."""
    if cap < 0:
        return _at_most(down, 0, length)
    with_image = _image_at_most(down, head, images, length, held, cap, search)
    if images_first and with_image > 0:
        return with_image
    return max(with_image, _at_most(down, 0, length))


@compiled
def _waiting(head: Ints, after: Ints, images: Ints, length: int, held: int, cap: int) -> int:
    """How many samples of a length may be taken, 2 standing for more."""
    count = 0
    if head[0, length] >= 0:
        count = 1 if after[head[0, length]] < 0 else 2
    if cap >= 0 and head[1, length] >= 0:
        if held == 0 or held + images[head[1, length]] <= cap:
            count += 1
    return count


@compiled
def _pair(
    down: Ints,
    head: Ints,
    after: Ints,
    images: Ints,
    largest: int,
    room: int,
    held: int,
    cap: int,
    search: int,
) -> int:
    """The larger length of two waiting samples that fill the room exactly, or `largest`."""
    length = largest
    for _ in range(search):
        if length == 0 or 2 * length < room:
            break
        partner = room - length
        if _waiting(head, after, images, partner, held, cap) >= (2 if partner == length else 1):
            return length
        length = _usable(down, head, images, length - 1, held, cap, search, False)
    return largest


@compiled
def _fill(
    length: Ints,
    images: Ints,
    capacity: int,
    cap: int,
    search: int,
    head: Ints,
    after: Ints,
    down: Ints,
    order: Ints,
    offsets: Ints,
) -> int:
    tokens = np.sum(length)
    image_tokens = np.sum(images)
    taken = np.zeros(len(length), dtype=np.int64)
    position = 0
    packs = 0
    oldest = 0
    while position < len(length):
        while taken[oldest] != 0:
            oldest += 1
        size = length[oldest]
        kind = 1 if cap >= 0 and images[oldest] > 0 else 0
        room = capacity
        held = 0
        while size > 0:
            sample = head[kind, size]
            head[kind, size] = after[sample]
            if after[sample] < 0:
                down[kind, size] = size - 1
            taken[sample] = 1
            order[position] = sample
            position += 1
            room -= size
            held += images[sample]

            behind = held * tokens < image_tokens * (capacity - room)
            size = _usable(down, head, images, room, held, cap, search, behind)
            if 0 < size < room:
                size = _pair(down, head, after, images, size, room, held, cap, search)
            kind = 0
            if cap >= 0 and size > 0 and head[1, size] >= 0:
                fits = held == 0 or held + images[head[1, size]] <= cap
                if fits and (behind or head[0, size] < 0 or head[1, size] < head[0, size]):
                    kind = 1
        packs += 1
        offsets[packs] = position
    return packs


@compiled
def _lbf(
    length: Ints,
    images: Ints,
    capacity: int,
    cap: int,
    search: int,
    order: Ints,
    offsets: Ints,
) -> int:
    """Each pack starts with the oldest sample; then the largest that fits, or a pair that fills it.

    Under a cap a pack that is behind the whole set's share of image tokens takes images first, or
    text would run out before them.
    """
    count = len(length)
    head = np.full((2, capacity + 1), -1, dtype=np.int64)
    after = np.full(count, -1, dtype=np.int64)
    for i in range(count):
        sample = count - 1 - i
        kind = 1 if cap >= 0 and images[sample] > 0 else 0
        after[sample] = head[kind, length[sample]]
        head[kind, length[sample]] = sample
    down = np.zeros((2, capacity + 1), dtype=np.int64)
    for kind in range(2):
        for size in range(1, capacity + 1):
            down[kind, size] = size if head[kind, size] >= 0 else down[kind, size - 1]
    return _fill(length, images, capacity, cap, search, head, after, down, order, offsets)


def _length_bucketed(
    length: Ints,
    images: Ints,
    capacity: int,
    cap: int,
    open_bins: int,  # noqa: ARG001 - one signature for all packers
    order: Ints,
    offsets: Ints,
) -> int:
    return _lbf(length, images, capacity, cap, _SEARCH, order, offsets)


_PACKERS: dict[str, Callable[[Ints, Ints, int, int, int, Ints, Ints], int]] = {
    "next_fit": _next_fit,
    "best_fit": _best_fit,
    "lbf": _length_bucketed,
}
