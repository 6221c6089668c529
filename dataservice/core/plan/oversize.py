"""What becomes of samples with images that are longer than a pack: shrunk, truncated or left out.

Invariants: a sample that is kept fits the pack; an image is whole or gone, its markup with it;
shrinking changes no token but image tokens, and never goes below the vision rules' min_pixels, or
min_tiles of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import sum_groups
from dataservice.core.settings import Oversize
from dataservice.core.tables import SampleColumns
from dataservice.core.vision import (
    VisionRules,
    num_patches,
    planned_sizes,
    squared,
    tokens_of,
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """int64 [N] each, one value a sample; `stop` 0 means that it is left out."""

    stop: Ints
    """Tokens that are kept, from the first one."""
    total_tokens: Ints
    """Of the whole sample at its planned image sizes."""
    image_limit: Ints
    """Of its images: the rules', or less where they were shrunk."""
    kept_images: Ints
    image_tokens: Ints
    """Of the kept images, as is what follows."""
    num_patches: Ints
    patches_squared: Ints


def fit_samples(
    columns: SampleColumns, *, rules: VisionRules, room: Ints, policy: Oversize
) -> Fitted:
    """Makes samples that are longer than a pack fit one, or leaves them out; `room` int64 [N] is
    how many tokens of each fit."""
    images = _Images(columns, rules)
    count = len(columns.text_tokens)
    limit = np.full(count, rules.limit, dtype=np.int64)
    kept = np.diff(columns.image_offsets)
    if policy == "shrink":
        limit = images.largest_fitting(room)
        stop = images.lengths(np.maximum(limit, rules.least_limit)) * (limit > 0)
    elif policy == "truncate":
        stop, kept = images.cut(room)
    else:
        stop = np.zeros(count, dtype=np.int64)
    return images.measured(stop, limit, kept * (stop > 0))


class _Images:
    def __init__(self, columns: SampleColumns, rules: VisionRules) -> None:
        self._columns = columns
        self._rules = rules
        self._offsets = columns.image_offsets
        self._sample = np.repeat(np.arange(len(columns.text_tokens)), np.diff(self._offsets))

    def _patches(self, limit: Ints) -> Ints:
        rules, columns = self._rules, self._columns
        high, wide = planned_sizes(columns.height, columns.width, rules, limit[self._sample])
        return num_patches(high, wide, rules)

    def _tokens(self, limit: Ints) -> Ints:
        return tokens_of(self._patches(limit), self._rules)

    def lengths(self, limit: Ints) -> Ints:
        """Of whole samples."""
        return self._columns.text_tokens + sum_groups(self._tokens(limit), self._offsets)

    def largest_fitting(self, room: Ints) -> Ints:
        """By sample: a limit with which it fits and with a 1/256 larger one does not, found
        by bisection; 0 where it does not fit with the least."""
        count = len(self._columns.text_tokens)
        low = np.full(count, self._rules.least_limit)
        high = np.full(count, self._rules.limit)
        fits = self.lengths(low) <= room
        while (open_ := high - low > np.maximum(low >> 8, 1)).any():
            middle = (low + high) // 2
            good = self.lengths(middle) <= room
            low = np.where(open_ & good, middle, low)
            high = np.where(open_ & ~good, middle, high)
        return low * fits

    def cut(self, room: Ints) -> tuple[Ints, Ints]:
        """(tokens kept, images kept): all that fits, or up to the image that would be cut."""
        columns, sample = self._columns, self._sample
        tokens = self._tokens(np.full(len(room), self._rules.limit))
        none = np.zeros(len(tokens), dtype=np.int64)
        before = none if columns.text_before is None else columns.text_before
        markup = none if columns.markup is None else columns.markup
        sums = np.cumsum(tokens) - tokens
        first = np.append(sums, 0)[self._offsets[:-1]]
        begin = before + sums - first[sample]
        end = begin + tokens + markup
        stop = room.copy()
        split = (begin < room[sample]) & (end > room[sample])
        stop[sample[split]] = begin[split]
        return stop, sum_groups((end <= stop[sample]).astype(np.int64), self._offsets)

    def measured(self, stop: Ints, limit: Ints, kept: Ints) -> Fitted:
        sizes = np.where(limit > 0, limit, self._rules.limit)
        patches = self._patches(sizes)
        place = np.arange(len(patches)) - self._offsets[:-1][self._sample]
        in_pack = patches * (place < kept[self._sample])
        return Fitted(
            stop=stop,
            total_tokens=self.lengths(sizes),
            image_limit=sizes,
            kept_images=kept,
            image_tokens=sum_groups(tokens_of(in_pack, self._rules), self._offsets),
            num_patches=sum_groups(in_pack, self._offsets),
            patches_squared=sum_groups(squared(in_pack, self._rules), self._offsets),
        )
