"""Length-bucketed fill: each pack starts with the oldest sample, then takes what fills it best.

Invariants: every sample is in exactly one pack, within the room and the caps; buckets only ever
become empty, so no search repeats.

After the oldest come the largest sample that fits, or the two that fill the room exactly. Samples
wait in FIFO buckets by (kind, length). Kind 1 are samples that take of a cap, kind 0 all others.
`down[kind, l]` leads to the largest non-empty length at or below l (0: none), as a union-find with
path halving. Under caps a pack that is behind the whole set's share of the tightest one takes
images first, or text would run out before them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataservice.core.compiled import compiled
from dataservice.core.packing.fit import within_caps
from dataservice.core.packing.rules import PackRules, Samples

Ints = NDArray[np.int64]

_SEARCH = 64  # lengths looked at: for a pair that fills the pack, and for images under the caps


def lbf(samples: Samples, rules: PackRules, order: Ints, offsets: Ints) -> int:
    return fill(
        samples.length, samples.use, samples.caps, rules.pack_length, _SEARCH, order, offsets
    )


@compiled
def _at_most(down: Ints, kind: int, length: int) -> int:
    while down[kind, length] != length:
        down[kind, length] = down[kind, down[kind, length]]
        length = down[kind, length]
    return length


@compiled
def _image_at_most(
    down: Ints, head: Ints, use: Ints, caps: Ints, length: int, held: Ints, search: int
) -> int:
    """The same among samples that take of a cap, of those whose oldest fits under the caps."""
    found = _at_most(down, 1, length)
    for _ in range(search):
        if found == 0 or within_caps(use, caps, held, head[1, found]):
            return found
        found = _at_most(down, 1, found - 1)
    return 0


@compiled
def _usable(
    down: Ints,
    head: Ints,
    use: Ints,
    caps: Ints,
    length: int,
    held: Ints,
    search: int,
    images_first: bool,
) -> int:
    """The largest length at or below `length` from which a sample may be taken; 0 for none."""
    if len(caps) == 0:
        return _at_most(down, 0, length)
    with_image = _image_at_most(down, head, use, caps, length, held, search)
    if images_first and with_image > 0:
        return with_image
    return max(with_image, _at_most(down, 0, length))


@compiled
def _waiting(head: Ints, after: Ints, use: Ints, caps: Ints, length: int, held: Ints) -> int:
    """How many samples of a length may be taken, 2 standing for more."""
    count = 0
    if head[0, length] >= 0:
        count = 1 if after[head[0, length]] < 0 else 2
    if head[1, length] >= 0 and within_caps(use, caps, held, head[1, length]):
        count += 1
    return count


@compiled
def _pair(
    down: Ints,
    head: Ints,
    after: Ints,
    use: Ints,
    caps: Ints,
    largest: int,
    room: int,
    held: Ints,
    search: int,
) -> int:
    """The larger length of two waiting samples that fill the room exactly, or `largest`."""
    length = largest
    for _ in range(search):
        if length == 0 or 2 * length < room:
            break
        partner = room - length
        if _waiting(head, after, use, caps, partner, held) >= (2 if partner == length else 1):
            return length
        length = _usable(down, head, use, caps, length - 1, held, search, False)
    return largest


@compiled
def _kind_to_take(
    head: Ints, use: Ints, caps: Ints, size: int, held: Ints, images_first: bool
) -> int:
    """Of a length's two buckets the one with images if it must, else the older head."""
    if head[1, size] < 0 or not within_caps(use, caps, held, head[1, size]):
        return 0
    if images_first or head[0, size] < 0 or head[1, size] < head[0, size]:
        return 1
    return 0


@compiled
def _buckets(length: Ints, capped: NDArray[np.bool_], capacity: int) -> tuple[Ints, Ints, Ints]:
    """(head [2, C + 1], after [N], down [2, C + 1])"""
    count = len(length)
    head = np.full((2, capacity + 1), -1, dtype=np.int64)
    after = np.full(count, -1, dtype=np.int64)
    for i in range(count):
        sample = count - 1 - i
        kind = 1 if capped[sample] else 0
        after[sample] = head[kind, length[sample]]
        head[kind, length[sample]] = sample
    down = np.zeros((2, capacity + 1), dtype=np.int64)
    for kind in range(2):
        for size in range(1, capacity + 1):
            down[kind, size] = size if head[kind, size] >= 0 else down[kind, size - 1]
    return head, after, down


@compiled
def fill(
    length: Ints,
    use: Ints,
    caps: Ints,
    capacity: int,
    search: int,
    order: Ints,
    offsets: Ints,
) -> int:
    """Number of packs; writes order [N] and offsets [N + 1]."""
    count = len(length)
    capped = np.zeros(count, dtype=np.bool_)
    total = 0
    for sample in range(count):
        for k in range(len(caps)):
            capped[sample] |= use[sample, k] > 0
        if len(caps) > 0:
            total += use[sample, 0]
    tokens = np.sum(length)
    head, after, down = _buckets(length, capped, capacity)
    taken = np.zeros(count, dtype=np.bool_)
    held = np.zeros(len(caps), dtype=np.int64)
    position = 0
    packs = 0
    oldest = 0
    while position < count:
        while taken[oldest]:
            oldest += 1
        size = length[oldest]
        kind = 1 if capped[oldest] else 0
        room = capacity
        held[:] = 0
        while size > 0:
            sample = head[kind, size]
            head[kind, size] = after[sample]
            if after[sample] < 0:
                down[kind, size] = size - 1
            taken[sample] = True
            order[position] = sample
            position += 1
            room -= size
            behind = False
            for k in range(len(caps)):
                held[k] += use[sample, k]
            if len(caps) > 0:
                behind = held[0] * tokens < total * (capacity - room)
            size = _usable(down, head, use, caps, room, held, search, behind)
            if 0 < size < room:
                size = _pair(down, head, after, use, caps, size, room, held, search)
            kind = 0
            if len(caps) > 0 and size > 0:
                kind = _kind_to_take(head, use, caps, size, held, behind)
        packs += 1
        offsets[packs] = position
    return packs
