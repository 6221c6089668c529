"""How sources are mixed: shares, lanes, window sizes, and which positions each window takes.

Invariants: shares and rates are exact fractions, so proportions are exact in the long run; in a
finite run no window mixes two epochs of the mixture, and after epoch e a lane has read floor(size *
repeat * (e + 1) + lane / lanes) positions of a source: exactly `repeat` times each sample where
that is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dataservice.core.cost import measure
from dataservice.core.order import SourceOrder
from dataservice.core.settings import PlanSettings, SourceShare
from dataservice.core.tables import IndexView, SourceStats
from dataservice.errors import ConfigError

MAX_AUTO_LANES = 32
AUTO_WINDOW_PACKS = (256, 512)
_MEAN_ROWS = 65_536
_FEW_PACKS = 64
_MANY_PACKS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSource:
    number: int
    """In the index."""
    order: SourceOrder
    share: Fraction
    """Of the samples of a window."""
    repeat: Fraction
    """Times an epoch reads it; 0 in an endless run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    sources: tuple[MixedSource, ...]
    num_lanes: int
    window_samples: int
    windows_per_epoch: int | None
    """None: endless."""
    num_windows: int | None
    warnings: tuple[str, ...]

    def span(self, source: MixedSource, lane: int, window: int) -> tuple[int, int]:
        """First position and one past the last that a lane's window takes of a source."""
        size = source.order.lane_size(lane)
        rate = self.rate(source, size)
        if self.windows_per_epoch is None:
            return math.floor(window * rate), math.floor((window + 1) * rate)
        epoch, turn = divmod(window, self.windows_per_epoch)
        phase = Fraction(lane, self.num_lanes)
        start = math.floor(size * source.repeat * epoch + phase)
        stop = math.floor(size * source.repeat * (epoch + 1) + phase)
        first = min(start + math.floor(turn * rate), stop)
        if turn + 1 == self.windows_per_epoch:
            return first, stop
        return first, min(start + math.floor((turn + 1) * rate), stop)

    def rate(self, source: MixedSource, size: int) -> Fraction:
        """Positions a window of a lane with `size` samples of the source takes."""
        samples = self.num_lanes * self.window_samples
        return samples * source.share * size / source.order.num_samples

    def windows_to_read_all(self, lane: int) -> int:
        """Windows after which a lane has read each of its samples at least once; 0 with none."""
        rates = [
            (size, self.rate(source, size))
            for source in self.sources
            if (size := source.order.lane_size(lane)) > 0
        ]
        return max((math.ceil(size / rate) + 1 for size, rate in rates), default=0)


def build_mixture(settings: PlanSettings, index: IndexView) -> Mixture:
    """Resolve shares, lanes and window; ConfigError names the setting that is wrong."""
    used = _used_sources(settings, index)
    counts = {number: sum(stats.shard_samples) for number, stats, _ in used}
    means = _Means(settings, index)
    if settings.epochs is None:
        repeats = dict.fromkeys(counts, Fraction(0))
        shares = _endless_shares(used, settings, means)
        epoch = Fraction(sum(counts.values()))
    else:
        repeats = {number: _exact("repeat", source) for number, _, source in used}
        epoch = sum((counts[n] * repeats[n] for n in counts), Fraction(0))
        shares = {n: counts[n] * repeats[n] / epoch for n in counts}
    mean = sum((shares[n] * means.of(n) for n in shares), Fraction(0))
    lanes, window = _lanes_and_window(settings, epoch, mean)
    per_epoch = None if settings.epochs is None else math.ceil(epoch / (lanes * window))
    return Mixture(
        sources=tuple(
            MixedSource(
                number=number,
                order=SourceOrder(
                    stats.name,
                    stats.shard_samples,
                    seed=settings.seed,
                    num_lanes=lanes,
                    segment=settings.segment,
                    open_segments=settings.open_segments,
                ),
                share=shares[number],
                repeat=repeats[number],
            )
            for number, stats, _ in used
        ),
        num_lanes=lanes,
        window_samples=window,
        windows_per_epoch=per_epoch,
        num_windows=None
        if settings.epochs is None or per_epoch is None
        else per_epoch * settings.epochs,
        warnings=_warnings(settings, lanes, window, epoch, mean),
    )


# ---- shares -------------------------------------------------------------------------------------


def _used_sources(
    settings: PlanSettings, index: IndexView
) -> list[tuple[int, SourceStats, SourceShare]]:
    """(number in the index, its stats, its share) of every source that gives samples."""
    known = {stats.name: (number, stats) for number, stats in enumerate(index.sources)}
    names = [source.name for source in settings.sources]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"sources: {name!r} is not in the index, which has {', '.join(sorted(known))}; "
                "build the index again or correct the name"
            )
        if names.count(name) > 1:
            raise ConfigError(f"sources: {name!r} is given twice; names must be distinct")
    kind = "repeat" if settings.epochs is not None else "weight"
    used = sorted(
        (*known[source.name], source)
        for source in settings.sources
        if _exact(kind, source) > 0 and sum(known[source.name][1].shard_samples) > 0
    )
    if not used:
        raise ConfigError(
            f"sources: no source has both a {kind} above 0 and a usable sample in the index"
        )
    return used


def _exact(kind: str, source: SourceShare) -> Fraction:
    text = source.repeat if kind == "repeat" else source.weight
    where = f"sources: {kind} of {source.name!r}"
    if text is None:
        raise ConfigError(f"{where} is missing; an endless run (epochs: null) needs one per source")
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f'{where} is {text!r}; write an exact decimal or fraction such as "0.3" or "1/3"'
        ) from error
    if value < 0:
        raise ConfigError(f"{where} is {text!r}; it must not be negative")
    return value


def _endless_shares(
    used: list[tuple[int, SourceStats, SourceShare]], settings: PlanSettings, means: _Means
) -> dict[int, Fraction]:
    parts = {number: _exact("weight", source) for number, _, source in used}
    if settings.weight_by == "tokens":
        for number, stats, source in used:
            mean = means.of(number)
            if mean == 0:
                raise ConfigError(
                    f"sources: {source.name!r} is weighted by tokens, but the "
                    f"{min(_MEAN_ROWS, sum(stats.shard_samples))} samples looked at have none"
                )
            parts[number] /= mean
    total = sum(parts.values(), Fraction(0))
    return {number: part / total for number, part in parts.items()}


class _Means:
    """Mean tokens of a sample, over at most 65,536 evenly spaced rows of each source."""

    def __init__(self, settings: PlanSettings, index: IndexView) -> None:
        self._settings = settings
        self._index = index
        self._known: dict[int, Fraction] = {}

    def of(self, source: int) -> Fraction:
        if source not in self._known:
            total = sum(self._index.sources[source].shard_samples)
            count = min(total, _MEAN_ROWS)
            rows = np.arange(count, dtype=np.int64) * total // count
            settings = self._settings
            measures = measure(
                self._index.columns(source, rows),
                rules=settings.vision,
                cost=settings.cost,
                p_ref=settings.p_ref,
            )
            self._known[source] = Fraction(int(measures.length.sum()), count)
        return self._known[source]


# ---- lanes and window ---------------------------------------------------------------------------


def _lanes_and_window(settings: PlanSettings, epoch: Fraction, mean: Fraction) -> tuple[int, int]:
    """Lanes (a power of two) and samples a window and lane, what is set kept as it is.

    A window is 256 to 512 packs and lanes * window at most a quarter of an epoch; where an epoch is
    too small for that, lanes give way first.
    """
    quarter = math.floor(epoch / 4)
    few, many = (max(1, _samples_of(packs, settings, mean)) for packs in AUTO_WINDOW_PACKS)
    if settings.lanes is not None:
        lanes = settings.lanes
        return lanes, settings.window or max(1, min(many, quarter // lanes))
    least = settings.window or few
    lanes = _first(lambda n: n * least <= quarter)
    return lanes, settings.window or max(1, min(many, quarter // lanes))


def _samples_of(packs: int, settings: PlanSettings, mean: Fraction) -> int:
    return math.floor(packs * settings.pack_length / mean) if mean > 0 else packs


def _first(fits: Callable[[int], bool]) -> int:
    lanes = MAX_AUTO_LANES
    while lanes > 1 and not fits(lanes):
        lanes //= 2
    return lanes


def _warnings(
    settings: PlanSettings, lanes: int, window: int, epoch: Fraction, mean: Fraction
) -> tuple[str, ...]:
    """What is unwise in settings made by hand; `auto` does what the data allows."""
    found = []
    if settings.epochs is not None:
        ignored = [s.name for s in settings.sources if s.weight is not None]
        if ignored:
            found.append(
                f"weight of {', '.join(ignored)} is not used: a finite run follows sizes and repeat"
            )
    if settings.lanes is None and settings.window is None:
        return tuple(found)
    size = math.floor(epoch)
    if lanes * window * 4 > epoch:
        found.append(
            f"lanes {lanes} x window {window} = {lanes * window} samples is more than a quarter of "
            f"an epoch ({size} samples): windows are few, and an epoch's last is far from full"
        )
    if lanes > size:
        found.append(f"lanes {lanes} exceeds the {size} samples of an epoch: some lanes are empty")
    packs = math.floor(window * mean / settings.pack_length)
    if packs < _FEW_PACKS or packs > _MANY_PACKS:
        low, high = AUTO_WINDOW_PACKS
        harm = "packs fill badly" if packs < _FEW_PACKS else "planning needs memory and time"
        found.append(
            f"window {window} is about {packs} packs of {settings.pack_length} tokens "
            f"({float(mean):.0f} tokens a sample); {harm}, {low} to {high} packs are usual"
        )
    return tuple(found)
