"""The order of samples: keyed permutations, lanes' ranges of a source, segments inside a range.

Invariants: every order is the stable argsort of raw Philox words whose key is the SHA-256 of
(seed, purpose, numbers), so it is the same on every machine and numpy version; position p of a
(lane, source) is found without walking to it, at the price of one permutation of the lane's
segments (range / segment length values) per epoch, kept in a small cache.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache

_PERMUTATIONS_KEPT = 256


def random_words(count: int, seed: int, purpose: str, *numbers: int | str) -> NDArray[np.uint64]:
    """uint64 [count] of raw Philox output, keyed by everything after `count`."""
    text = "\x1f".join(str(part) for part in (seed, purpose, *numbers))
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    words: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return words


def permutation(count: int, seed: int, purpose: str, *numbers: int | str) -> NDArray[np.int64]:
    """int64 [count]: a keyed order of 0..count-1."""
    words = random_words(count, seed, purpose, *numbers)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def interleave(
    places: NDArray[np.int64], segments: NDArray[np.int64], size: int, segment: int, width: int
) -> NDArray[np.int64]:
    """Where in a range of `size` samples the given places of one epoch are; int64, same shape.

    `segments` is the epoch's order of the range's ceil(size / segment) segments, of which only the
    range's last may be short. `width` segments are open at once and read round robin until all of
    them are used up. Each place is in 0..size-1, each result too, and together they are a
    bijection.
    """
    num = len(segments)
    missing = num * segment - size
    short_at = int(np.flatnonzero(segments == num - 1)[0])
    short_group, short_slot = divmod(short_at, width)
    full = width * segment
    # Groups before the short segment's start at multiples of `full`, those after it `missing`
    # sooner.
    after = places >= min((short_group + 1) * full - missing, size)
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
    where: NDArray[np.int64] = segments[group * width + slot] * segment + row
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
        self._seed = seed
        self._num_lanes = num_lanes
        self._segment = segment
        self._width = open_segments
        counts = np.array(shard_samples, dtype=np.int64)
        order = permutation(len(counts), seed, "shards", name)
        first_rows = np.cumsum(counts) - counts
        self._ends = np.cumsum(counts[order])
        self._first_row = first_rows[order]
        self._first_place = self._ends - counts[order]
        self._segments: LRUCache[tuple[int, int], NDArray[np.int64]] = LRUCache(_PERMUTATIONS_KEPT)

    def lane_range(self, lane: int) -> tuple[int, int]:
        """First place and one past the last, in the sequence of permuted shards."""
        total, lanes = self.num_samples, self._num_lanes
        return lane * total // lanes, (lane + 1) * total // lanes

    def lane_size(self, lane: int) -> int:
        start, stop = self.lane_range(lane)
        return stop - start

    def rows(self, lane: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample numbers (rows of the source) at the given positions of the lane, any epochs."""
        start, stop = self.lane_range(lane)
        size = stop - start
        epochs, places = np.divmod(positions, size)
        if size <= self._segment:  # a single segment: every epoch has the same order
            epochs = np.zeros_like(epochs)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            segments = self._epoch_segments(lane, int(epoch), size)
            found[chosen] = interleave(places[chosen], segments, size, self._segment, self._width)
        sequence = start + found
        shard = np.searchsorted(self._ends, sequence, side="right")
        rows: NDArray[np.int64] = self._first_row[shard] + sequence - self._first_place[shard]
        return rows

    def _epoch_segments(self, lane: int, epoch: int, size: int) -> NDArray[np.int64]:
        count = -(-size // self._segment)
        return self._segments.get(
            (lane, epoch),
            lambda: permutation(count, self._seed, "segments", self.name, lane, epoch),
        )
