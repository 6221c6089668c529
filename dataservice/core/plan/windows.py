"""One window of one lane: its samples read, mixed, made to fit, packed and shuffled.

Invariants: a pure function of (settings, index, mixture, lane, window number); packs have room for
their documents aligned; every sample of the
window is in packs, whole, as all of its pieces or as what the oversize policy leaves of it, or
counted as left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.alignment import padded, room
from dataservice.core.cost import measure, sample_cost, sum_groups
from dataservice.core.order import permutation, random_words
from dataservice.core.order.mixing import Mixture, PhaseMix
from dataservice.core.packing import Packing, PackRules, pack
from dataservice.core.plan.oversize import fit_samples
from dataservice.core.settings import PlanSettings
from dataservice.core.tables import REASONS, IndexView, SampleColumns, WindowPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Samples:
    """int64 [N] each, one value a sample, in window order; `stop` 0 leaves one out."""

    source: Ints
    row: Ints
    stop: Ints
    total_tokens: Ints
    loss_tokens: Ints
    image_tokens: Ints
    kept_images: Ints
    num_patches: Ints
    patches_squared: Ints
    image_limit: Ints
    num_docs: Ints
    room: Ints
    """Tokens of it that fit a pack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Items:
    """int64 [N] each; an item is a sample or a piece of one."""

    sample: Ints
    """Its number among the samples."""
    start: Ints
    stop: Ints
    loss_tokens: Ints
    cost: Ints


def plan_window(
    settings: PlanSettings, index: IndexView, mixture: Mixture, lane: int, window: int
) -> WindowPlan:
    phase = mixture.phase_of(window)
    counts = np.zeros((len(REASONS), len(index.sources)), dtype=np.int64)
    samples = _samples(settings, index, mixture, phase, lane, window, counts)
    mixed = permutation(len(samples.row), settings.seed, "window", lane, window)
    items = _cut(settings, samples, mixed[samples.stop[mixed] > 0])
    of = items.sample
    packing = pack(
        padded(items.stop - items.start, samples.num_docs[of], settings.align),
        samples.image_tokens[of],
        samples.num_patches[of],
        samples.kept_images[of],
        _balanced_by(settings, phase, samples, items),
        _pack_rules(settings, phase),
        seed=int(random_words(1, settings.seed, "window packs", lane, window)[0]),
    )
    _count(counts, "over_cap", samples.source[of[_over_caps(settings, samples, of)]])
    return _window_plan(settings, lane, window, phase, samples, items, packing, counts)


def window_rows(index: IndexView, mixture: Mixture, lane: int, window: int) -> tuple[Ints, Ints]:
    """(source number, row in the index) of a window's samples, source by source."""
    source, row = mixture.in_lane(mixture.phase_of(window), lane).samples(window)
    if mixture.kind is not None:
        row = index.rows_of_kind(source, mixture.kind, row)
    return source, row


def _count(counts: Ints, reason: str, sources: Ints) -> None:
    counts[REASONS.index(reason)] += np.bincount(sources, minlength=counts.shape[1])


def _pack_rules(settings: PlanSettings, phase: PhaseMix) -> PackRules:
    return PackRules(
        packer=phase.packer,
        pack_length=phase.pack_length,
        open_bins=settings.open_bins,
        image_token_cap=settings.image_token_cap,
        patch_cap=settings.patch_cap,
        image_cap=settings.image_cap,
        llm_vit_ratio=settings.llm_vit_ratio,
        reference_ranks=settings.reference_ranks,
        reference_micro_steps=settings.reference_micro_steps,
    )


def _samples(
    settings: PlanSettings,
    index: IndexView,
    mixture: Mixture,
    phase: PhaseMix,
    lane: int,
    window: int,
    counts: Ints,
) -> _Samples:
    """The window's samples, source by source, those longer than a pack by the oversize policy."""
    source, row = window_rows(index, mixture, lane, window)
    columns = index.columns(source, row)
    measures = measure(columns, rules=phase.rules)
    samples = _Samples(
        source=source,
        row=row,
        stop=measures.length.copy(),
        total_tokens=measures.length.copy(),
        loss_tokens=measures.loss_tokens.copy(),
        image_tokens=measures.image_tokens,
        kept_images=measures.num_images,
        num_patches=measures.num_patches,
        patches_squared=measures.patches_squared,
        image_limit=np.full(len(row), phase.rules.limit, dtype=np.int64),
        num_docs=columns.documents,
        room=room(phase.pack_length, columns.documents, settings.align),
    )
    _count(counts, "rejected", source[measures.length == 0])
    long = measures.length > samples.room
    _count(counts, "split", source[long & (measures.num_images == 0)])
    oversize = np.flatnonzero(long & (measures.num_images > 0))
    if oversize.size:
        _fit_oversize(settings, phase, columns.take(oversize), samples, oversize, counts)
    return samples


def _fit_oversize(
    settings: PlanSettings,
    phase: PhaseMix,
    columns: SampleColumns,
    samples: _Samples,
    where: Ints,
    counts: Ints,
) -> None:
    """Changes the samples at `where`, of which `columns` are, in place; a truncated one's loss
    tokens are its share of the text."""
    fitted = fit_samples(
        columns, rules=phase.rules, room=samples.room[where], policy=settings.oversize
    )
    source = samples.source[where]
    all_images = samples.kept_images[where]
    text = np.maximum(columns.text_tokens, 1)
    kept_text = fitted.stop - fitted.image_tokens
    samples.loss_tokens[where] = samples.loss_tokens[where] * kept_text // text
    for name in (
        "stop",
        "total_tokens",
        "image_limit",
        "kept_images",
        "image_tokens",
        "num_patches",
        "patches_squared",
    ):
        getattr(samples, name)[where] = getattr(fitted, name)
    out = fitted.stop == 0
    lost = ~out & (fitted.kept_images < all_images)
    for reason, chosen in (
        ("dropped_long", out),
        ("images_cut", lost),
        ("truncated", ~out & ~lost & (fitted.stop < fitted.total_tokens)),
        ("shrunk", ~out & (fitted.image_limit < phase.rules.limit)),
    ):
        _count(counts, reason, source[chosen])


def _cut(settings: PlanSettings, samples: _Samples, kept: Ints) -> _Items:
    """The kept samples in their order; those longer than a pack in pieces that fill one.

    A piece's loss tokens are its share of the sample's by position, less one where the first label
    of a piece is masked.
    """
    pieces = -(-samples.stop[kept] // samples.room[kept])
    sample = np.repeat(kept, pieces)
    piece = np.arange(len(sample)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    total = samples.stop[sample]
    start = piece * samples.room[sample]
    stop = np.minimum(start + samples.room[sample], total)
    loss = samples.loss_tokens[sample]
    planned = loss * stop // total - loss * start // total
    planned -= (start > 0) & (planned > 0)
    return _Items(
        sample=sample,
        start=start,
        stop=stop,
        loss_tokens=planned,
        cost=sample_cost(
            settings.cost,
            num_patches=samples.num_patches[sample],
            patches_squared=samples.patches_squared[sample],
            image_tokens=samples.image_tokens[sample],
            length=stop - start,
            p_ref=settings.p_ref,
            fitted=settings.fitted,
        ),
    )


def _balanced_by(settings: PlanSettings, phase: PhaseMix, samples: _Samples, items: _Items) -> Ints:
    """What the packer evens out: the plan's cost, or what nbin is told to."""
    if phase.packer == "nbin" and settings.nbin_balance == "image_tokens":
        return samples.image_tokens[items.sample]
    if phase.packer == "nbin" and settings.cost == "image_tokens":
        patches, squared = samples.num_patches, samples.patches_squared
        return (settings.p_ref * patches + squared)[items.sample]
    return items.cost


def _over_caps(settings: PlanSettings, samples: _Samples, items: Ints) -> NDArray[np.bool_]:
    over = np.zeros(len(items), dtype=bool)
    for cap, values in (
        (settings.image_token_cap, samples.image_tokens),
        (settings.patch_cap, samples.num_patches),
        (settings.image_cap, samples.kept_images),
    ):
        if cap is not None:
            over |= values[items] > cap
    return over


def _window_plan(
    settings: PlanSettings,
    lane: int,
    window: int,
    phase: PhaseMix,
    samples: _Samples,
    items: _Items,
    packing: Packing,
    counts: Ints,
) -> WindowPlan:
    order, offsets = packing.order, packing.offsets
    of = items.sample[order]

    def by_pack(values: Ints) -> Ints:
        return sum_groups(values, offsets)

    return WindowPlan(
        lane=lane,
        window=window,
        pack_length=phase.pack_length,
        item_offsets=offsets,
        source=samples.source[of],
        row=samples.row[of],
        start=items.start[order],
        stop=items.stop[order],
        total_tokens=samples.total_tokens[of],
        kept_images=samples.kept_images[of],
        image_limit=samples.image_limit[of],
        tokens=by_pack((items.stop - items.start)[order]),
        image_tokens=by_pack(samples.image_tokens[of]),
        num_images=by_pack(samples.kept_images[of]),
        num_patches=by_pack(samples.num_patches[of]),
        loss_tokens=by_pack(items.loss_tokens[order]),
        cost=by_pack(items.cost[order]),
        counts=counts,
        align=settings.align,
    )
