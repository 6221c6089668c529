"""The order of samples: keyed permutations, lanes' ranges of a source, segments inside a range.

Invariants: every order is the stable argsort of raw Philox words whose key is the SHA-256 of
(seed, purpose, numbers), so it is the same on every machine and numpy version; position p of a
(lane, source) is found without walking to it, at the price of one permutation of the lane's
segments (range / segment length values) per epoch, kept in a small cache.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache

_PERMUTATIONS_KEPT = 256


def random_words(count: int, seed: int, purpose: str, *numbers: int | str) -> NDArray[np.uint64]:
    """uint64 [count] of raw Philox output, keyed by everything after `count`."""
    text = "\x1f".join(str(part) for part in (seed, purpose, *numbers))
    key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8")
    generator = _philox()
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": key},
        "buffer": _ZEROS,
        "buffer_pos": len(_ZEROS),
        "has_uint32": 0,
        "uinteger": 0,
    }
    words: NDArray[np.uint64] = generator.random_raw(count)
    return words


_ZEROS = np.zeros(4, dtype=np.uint64)
_OF_THREAD = threading.local()


def _philox() -> np.random.Philox:
    """One a thread: a new key costs 3 microseconds, a new generator 20."""
    if not hasattr(_OF_THREAD, "philox"):
        _OF_THREAD.philox = np.random.Philox(key=0)
    found: np.random.Philox = _OF_THREAD.philox
    return found


def permutation(count: int, seed: int, purpose: str, *numbers: int | str) -> NDArray[np.int64]:
    """int64 [count]: a keyed order of 0..count-1."""
    words = random_words(count, seed, purpose, *numbers)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch's order of a range's ceil(size / segment) segments, of which only the range's last
    may be short."""

    segments: NDArray[np.int64]
    short_at: int
    """Where in `segments` the range's last one is."""


def epoch_order(segments: NDArray[np.int64]) -> Epoch:
    return Epoch(segments=segments, short_at=int(segments.argmax()))


def interleave(
    places: NDArray[np.int64],
    segments: NDArray[np.int64],
    size: int | NDArray[np.int64],
    short_at: int | NDArray[np.int64],
    segment: int,
    width: int,
    first: int | NDArray[np.int64] = 0,
) -> NDArray[np.int64]:
    """Where in a range of `size` samples the given places of one epoch are; int64, same shape.

    `width` of the epoch's segments are open at once and read round robin until all of them are used
    up. Each place is in 0..size-1, each result too, and together they are a bijection. For places
    of several ranges and epochs `size` and `short_at` are arrays, one value a place; segment number
    0 of a place's epoch is segments[first].
    """
    num = -(-size // segment)
    missing = num * segment - size
    short_group, short_slot = np.divmod(short_at, width)
    full = width * segment
    # Groups before the short segment's start at multiples of `full`, those after it `missing`
    # sooner.
    after = places >= np.minimum((short_group + 1) * full - missing, size)
    shifted = places + missing * after
    group, offset = np.divmod(shifted, full)
    open_now = np.minimum(width, num - group * width)
    row, slot = np.divmod(offset, open_now)

    short_rows = segment - missing
    tail = (group == short_group) & (row >= short_rows)
    rest = offset - short_rows * open_now
    tail_row, tail_slot = np.divmod(rest, np.maximum(open_now - 1, 1))
    row = np.where(tail, short_rows + tail_row, row)
    slot = np.where(tail, tail_slot + (tail_slot >= short_slot), slot)
    where: NDArray[np.int64] = segments[first + group * width + slot] * segment + row
    return where


class SourceOrder:
    """The order in which every lane reads one source. Thread-safe.

    The source's shards are permuted once by the seed and concatenated; lane l of L owns samples
    l*N//L .. (l+1)*N//L of that sequence; inside it segments are permuted anew each epoch.
    """

    def __init__(
        self,
        name: str,
        shard_samples: tuple[int, ...],
        *,
        seed: int,
        num_lanes: int,
        segment: int,
        open_segments: int,
    ) -> None:
        self.name = name
        self.num_samples = sum(shard_samples)
        self.segment = segment
        self.open_segments = open_segments
        self._seed = seed
        self._num_lanes = num_lanes
        counts = np.array(shard_samples, dtype=np.int64)
        order = permutation(len(counts), seed, "shards", name)
        self.shard_places = np.cumsum(counts[order]) - counts[order]
        """Where in the sequence each shard begins, in its order."""
        self.shard_rows = (np.cumsum(counts) - counts)[order]
        """Sample number of each one's first sample."""
        self._epochs: LRUCache[tuple[int, int], Epoch] = LRUCache(_PERMUTATIONS_KEPT)

    def lane_range(self, lane: int) -> tuple[int, int]:
        """First place and one past the last, in the sequence of permuted shards."""
        total, lanes = self.num_samples, self._num_lanes
        return lane * total // lanes, (lane + 1) * total // lanes

    def lane_size(self, lane: int) -> int:
        start, stop = self.lane_range(lane)
        return stop - start

    def epoch(self, lane: int, number: int, size: int) -> Epoch:
        """`size` is the lane's."""
        return self._epochs.get(
            (lane, number),
            lambda: epoch_order(
                permutation(
                    -(-size // self.segment), self._seed, "segments", self.name, lane, number
                )
            ),
        )


_WHOLE = epoch_order(np.zeros(1, dtype=np.int64))


class MixedOrder:
    """The order in which lanes read several sources; a call costs the rows it is asked for.

    All orders have the same lanes, segment length and number of open segments. Thread-safe.
    """

    def __init__(self, orders: Sequence[SourceOrder]) -> None:
        self._orders = orders
        sizes = [order.num_samples for order in orders]
        self._base = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        """Where each source's sequence begins when all stand one after the other."""
        self._shard_places = np.concatenate(
            [order.shard_places + base for order, base in zip(orders, self._base, strict=True)]
        )
        self._shard_rows = np.concatenate([order.shard_rows for order in orders])

    def rows(self, lane: int, spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Sample numbers at a lane's positions first..stop of each source, source by source.

        A position is epoch p // size, place p % size in it. A source of at most a segment has one
        order for all epochs.
        """
        segment, width = self._orders[0].segment, self._orders[0].open_segments
        pieces: list[tuple[int, ...]] = []  # count, place, source, size, start, short_at, first
        segments: list[NDArray[np.int64]] = []
        held = 0
        for number, (position, stop) in enumerate(spans):
            start, end = self._orders[number].lane_range(lane)
            size = end - start
            while position < stop:
                epoch, place = divmod(position, size)
                if size <= segment:
                    count, found, group = stop - position, _WHOLE, 0
                else:
                    count = min(stop - position, size - place)
                    found = self._orders[number].epoch(lane, epoch, size)
                    group = place // (segment * width)
                last_group = (place + count + segment) // (segment * width)
                used = found.segments[group * width : (last_group + 1) * width]
                first = held - group * width
                pieces.append((count, place, number, size, start, found.short_at, first))
                segments.append(used)
                held += len(used)
                position += count
        if not pieces:
            return np.zeros(0, dtype=np.int64)
        table = np.array(pieces, dtype=np.int64).T
        counts = table[0]
        place, source, size_of, start_of, short_at, first_of = np.repeat(table[1:], counts, axis=1)
        place += np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        where = interleave(
            place % size_of,
            np.concatenate(segments),
            size_of,
            short_at,
            segment,
            width,
            first_of,
        )
        where += start_of + self._base[source]
        shard = np.searchsorted(self._shard_places, where, side="right") - 1
        rows: NDArray[np.int64] = self._shard_rows[shard] + where - self._shard_places[shard]
        return rows
