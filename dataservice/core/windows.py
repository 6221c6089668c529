"""One window of one lane: its samples read, mixed, cut where allowed, packed and shuffled.

Invariants: a pure function of (settings, index, mixture, lane, window number); every sample of the
window is in packs, whole or as all of its pieces, or counted as dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import SampleMeasures, measure, sum_groups
from dataservice.core.mixing import Mixture
from dataservice.core.order import permutation, random_words
from dataservice.core.packing import pack
from dataservice.core.settings import PlanSettings
from dataservice.core.tables import IndexView, WindowPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Items:
    """int64 [N] each; an item is a sample or a piece of one."""

    source: Ints
    row: Ints
    start: Ints
    stop: Ints
    total_tokens: Ints
    loss_tokens: Ints
    image_tokens: Ints
    num_images: Ints
    num_patches: Ints
    cost: Ints


def plan_window(
    settings: PlanSettings, index: IndexView, mixture: Mixture, lane: int, window: int
) -> WindowPlan:
    source, row, measures = _samples(settings, index, mixture, lane, window)
    length = measures.length
    empty = length == 0
    oversize = (length > settings.pack_length) & (measures.num_images > 0)
    mixed = permutation(len(row), settings.seed, "window", lane, window)
    kept = mixed[~(empty | oversize)[mixed]]
    items = _cut(source, row, measures, kept, settings.pack_length)
    limits: dict[str, int | None] = {"image_token_cap": settings.image_token_cap}
    if settings.packer == "best_fit":
        limits["open_bins"] = settings.open_bins
    packing = pack(
        items.stop - items.start,
        items.image_tokens,
        items.cost,
        pack_length=settings.pack_length,
        packer=settings.packer,
        seed=int(random_words(1, settings.seed, "window packs", lane, window)[0]),
        **limits,
    )
    order, offsets = packing.order, packing.offsets

    def by_pack(values: Ints) -> Ints:
        return sum_groups(values[order], offsets)

    num_sources = len(index.sources)
    return WindowPlan(
        lane=lane,
        window=window,
        item_offsets=offsets,
        source=items.source[order],
        row=items.row[order],
        start=items.start[order],
        stop=items.stop[order],
        total_tokens=items.total_tokens[order],
        tokens=by_pack(items.stop - items.start),
        image_tokens=by_pack(items.image_tokens),
        num_images=by_pack(items.num_images),
        num_patches=by_pack(items.num_patches),
        loss_tokens=by_pack(items.loss_tokens),
        cost=by_pack(items.cost),
        dropped_oversize=np.bincount(source[oversize], minlength=num_sources).astype(np.int64),
        dropped_empty=np.bincount(source[empty], minlength=num_sources).astype(np.int64),
    )


def _samples(
    settings: PlanSettings, index: IndexView, mixture: Mixture, lane: int, window: int
) -> tuple[Ints, Ints, SampleMeasures]:
    """(source, row, measures) of the window's samples, source by source."""
    sources: list[Ints] = []
    rows: list[Ints] = []
    parts: list[SampleMeasures] = []
    for mixed in mixture.sources:
        first, stop = mixture.span(mixed, lane, window)
        if first == stop:
            continue
        taken = mixed.order.rows(lane, np.arange(first, stop, dtype=np.int64))
        sources.append(np.full(len(taken), mixed.number, dtype=np.int64))
        rows.append(taken)
        parts.append(
            measure(
                index.columns(mixed.number, taken),
                rules=settings.vision,
                cost=settings.cost,
                p_ref=settings.p_ref,
            )
        )

    def joined(arrays: list[Ints]) -> Ints:
        return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])

    measures = SampleMeasures(
        length=joined([part.length for part in parts]),
        loss_tokens=joined([part.loss_tokens for part in parts]),
        image_tokens=joined([part.image_tokens for part in parts]),
        num_images=joined([part.num_images for part in parts]),
        num_patches=joined([part.num_patches for part in parts]),
        cost=joined([part.cost for part in parts]),
    )
    return joined(sources), joined(rows), measures


def _cut(source: Ints, row: Ints, measures: SampleMeasures, kept: Ints, pack_length: int) -> _Items:
    """The kept samples in their order; those longer than a pack as pack-long pieces.

    A piece's loss tokens are its share of the sample's by position, less one where the first label
    of a piece is masked.
    """
    length = measures.length[kept]
    pieces = -(-length // pack_length)
    sample = np.repeat(kept, pieces)
    piece = np.arange(len(sample)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    total = measures.length[sample]
    start = piece * pack_length
    stop = np.minimum(start + pack_length, total)
    loss = measures.loss_tokens[sample]
    planned = loss * stop // total - loss * start // total
    planned -= (start > 0) & (planned > 0)
    return _Items(
        source=source[sample],
        row=row[sample],
        start=start,
        stop=stop,
        total_tokens=total,
        loss_tokens=planned,
        image_tokens=measures.image_tokens[sample],
        num_images=measures.num_images[sample],
        num_patches=measures.num_patches[sample],
        cost=measures.cost[sample],
    )
