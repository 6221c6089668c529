"""How sources are mixed: phases, shares, lanes and the size of a window.

Invariants: shares are exact fractions; a phase goes on where the one before left each source;
lanes and window follow the first phase's sources and the longest pack of all phases, so phases of
other weights, sources or pixels may be added behind a phase without a change to it.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from dataservice.core.order import MixedOrder, SourceOrder
from dataservice.core.order.lane_mix import LaneMix, MixedSource
from dataservice.core.order.shares import (
    Means,
    UsedSource,
    Weights,
    base_weights,
    shares_of,
    used_sources,
)
from dataservice.core.order.window_size import WindowSize
from dataservice.core.settings import Kind, Packer, Phase, PlanSettings, Segregation
from dataservice.core.tables import IndexView
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMix:
    """One phase with all its settings."""

    number: int
    first_window: int
    end_window: int | None
    """One past its last; None = endless."""
    last_pack: int | None
    """Packs of the plan, all streams and phases together, after which it is cut."""
    pack_length: int
    packer: Packer
    rules: VisionRules
    sources: tuple[MixedSource, ...]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    kind: Kind | None
    phases: tuple[PhaseMix, ...]
    num_lanes: int
    window_samples: int
    windows_per_epoch: int | None
    """None: endless."""
    num_windows: int | None
    warnings: tuple[str, ...]

    @cached_property
    def _first_windows(self) -> list[int]:
        return [phase.first_window for phase in self.phases]

    def phase_of(self, window: int) -> PhaseMix:
        return self.phases[bisect.bisect_right(self._first_windows, window) - 1]

    def in_lane(self, phase: PhaseMix, lane: int) -> LaneMix:
        """What the lane's windows of a phase take."""
        key = (phase.number, lane)
        if key not in self._lanes:
            self._lanes[key] = LaneMix(
                phase.sources,
                self._orders[phase.number],
                lane=lane,
                num_lanes=self.num_lanes,
                window_samples=self.window_samples,
                first_window=phase.first_window,
                windows_per_epoch=self.windows_per_epoch,
            )
        return self._lanes[key]

    @cached_property
    def _orders(self) -> list[MixedOrder]:
        """By phase."""
        return [MixedOrder([source.order for source in phase.sources]) for phase in self.phases]

    @cached_property
    def _lanes(self) -> dict[tuple[int, int], LaneMix]:
        return {}


def build_mixture(settings: PlanSettings, index: IndexView, kind: Kind | None = None) -> Mixture:
    """Resolve phases, shares, lanes and window; ConfigError names the setting that is wrong."""
    return _Builder(settings, index, kind).build()


class _Builder:
    def __init__(self, settings: PlanSettings, index: IndexView, kind: Kind | None) -> None:
        self._settings = settings
        self._index = index
        self._kind = kind
        self._means = Means(settings, index, kind)
        self._phases = settings.phases or (Phase(),)
        self._base = base_weights(settings)
        share = settings.segregate and getattr(settings.segregate, kind or "text")
        if share and share.weights is not None:
            self._base = dict(share.weights)
        self._orders: dict[int, SourceOrder] = {}

    def build(self) -> Mixture:
        settings = self._settings
        used = [self._used(number, phase) for number, phase in enumerate(self._phases)]
        first = used[0]
        shares = shares_of(first, settings, self._means, self._rules(self._phases[0]))
        finite = settings.epochs is not None
        epoch = Fraction(sum(s.num_samples * (s.part if finite else 1) for s in first))
        size = WindowSize(
            settings=settings,
            pack_length=max(self._pack_length(phase) for phase in self._phases),
            epoch=epoch,
            mean=lambda: (
                self._means.over(first, shares, self._rules(self._phases[0])) + self._mean_filler
            ),
        )
        lanes, window = size.lanes_and_window()
        per_epoch = math.ceil(epoch / (lanes * window)) if finite else None
        num_windows = None if per_epoch is None else per_epoch * (settings.epochs or 0)
        phases = self._lay_out(used, lanes, window, num_windows)
        return Mixture(
            kind=self._kind,
            phases=phases,
            num_lanes=lanes,
            window_samples=window,
            windows_per_epoch=per_epoch,
            num_windows=num_windows,
            warnings=(
                *_unused_weights(settings),
                *size.warnings(lanes, window),
                *_phase_warnings(settings, phases, num_windows),
            ),
        )

    def _used(self, number: int, phase: Phase) -> list[UsedSource]:
        weights: Weights = self._base if phase.weights is None else dict(phase.weights)
        used = used_sources(self._settings, self._index, self._kind, weights)
        if not used:
            where = f"phases[{number}]" if self._settings.phases else "sources"
            word = "repeat" if self._settings.epochs is not None else "weight"
            what = {None: "", "text": " without images", "vision": " with images"}[self._kind]
            raise ConfigError(
                f"{where}: no source has both a {word} above 0 and a usable sample{what} in the "
                "index"
            )
        return used

    def _rules(self, phase: Phase) -> VisionRules:
        return phase.rules(self._settings.vision)

    @property
    def _mean_filler(self) -> Fraction:
        """Tokens behind a sample of one document, had its length any remainder alike."""
        return Fraction(self._settings.align - 1, 2)

    def _pack_length(self, phase: Phase) -> int:
        return phase.pack_length or self._settings.pack_length

    def _lay_out(
        self, used: list[list[UsedSource]], lanes: int, window: int, num_windows: int | None
    ) -> tuple[PhaseMix, ...]:
        laid: list[PhaseMix] = []
        taken: dict[int, Fraction] = {}
        first = 0
        for number, (phase, sources) in enumerate(zip(self._phases, used, strict=True)):
            shares = shares_of(sources, self._settings, self._means, self._rules(phase))
            end = num_windows
            if number + 1 < len(self._phases):
                end = first + self._windows(number, phase, sources, shares, lanes * window)
                end = end if num_windows is None else min(end, num_windows)
            laid.append(
                PhaseMix(
                    number=number,
                    first_window=first,
                    end_window=end,
                    last_pack=phase.packs if phase.windows else None,
                    pack_length=self._pack_length(phase),
                    packer=phase.packer or self._settings.packer,
                    rules=self._rules(phase),
                    sources=self._mixed(sources, shares, taken, lanes),
                )
            )
            if end is not None:
                for source, share in shares.items():
                    read = (end - first) * lanes * window * share
                    taken[source] = taken.get(source, Fraction(0)) + read
                first = end
        return tuple(laid)

    def _windows(
        self,
        number: int,
        phase: Phase,
        sources: list[UsedSource],
        shares: dict[int, Fraction],
        samples: int,
    ) -> int:
        """Of a phase, when a window of all lanes has `samples`."""
        given = phase.vision_windows if self._kind == "vision" else phase.windows
        if given is not None:
            return given
        mean = self._means.over(sources, shares, self._rules(phase))
        if mean == 0:
            raise ConfigError(
                f"plan: phases[{number}]: packs cannot be turned into windows, as the samples "
                "looked at have no tokens; give windows"
            )
        packs = Fraction(phase.packs or 0)
        if self._settings.segregate is not None and self._kind is not None:
            packs *= _kind_share(self._settings.segregate, self._kind)
        return math.ceil(packs * self._pack_length(phase) / (samples * (mean + self._mean_filler)))

    def _mixed(
        self,
        used: list[UsedSource],
        shares: dict[int, Fraction],
        taken: dict[int, Fraction],
        lanes: int,
    ) -> tuple[MixedSource, ...]:
        settings = self._settings
        for source in used:
            if source.number not in self._orders:
                self._orders[source.number] = SourceOrder(
                    source.stats.name,
                    source.shard_samples,
                    seed=settings.seed,
                    num_lanes=lanes,
                    segment=settings.segment,
                    open_segments=settings.open_segments,
                )
        return tuple(
            MixedSource(
                number=source.number,
                order=self._orders[source.number],
                share=shares[source.number],
                repeat=Fraction(0) if settings.epochs is None else source.part,
                taken=taken.get(source.number, Fraction(0)),
            )
            for source in used
        )


def _kind_share(segregate: Segregation, kind: Kind) -> Fraction:
    """Part of a step's packs that are of a kind."""
    packs = {
        name: share.micro_steps * share.packs_per_cell
        for name, share in (("text", segregate.text), ("vision", segregate.vision))
    }
    return Fraction(packs[kind], sum(packs.values()))


def _unused_weights(settings: PlanSettings) -> list[str]:
    ignored = [source.name for source in settings.sources if source.weight is not None]
    if settings.epochs is None or not ignored:
        return []
    return [f"weight of {', '.join(ignored)} is not used: a finite run follows sizes and repeat"]


def _phase_warnings(
    settings: PlanSettings, phases: tuple[PhaseMix, ...], num_windows: int | None
) -> list[str]:
    found = []
    for phase in phases[1:]:
        if num_windows is not None and phase.first_window >= num_windows:
            found.append(
                f"phases[{phase.number}] is never reached: the phases before it take all "
                f"{num_windows} windows of the run"
            )
    longest = max(phases, key=lambda phase: phase.pack_length)
    auto = [name for name in ("lanes", "window") if getattr(settings, name) is None]
    if auto and longest.pack_length > phases[0].pack_length:
        found.append(
            f"{' and '.join(auto)}: auto follows the longest pack_length, {longest.pack_length} of "
            f"phases[{longest.number}]; a run begun without that phase goes on only with the "
            "lanes and window it began with, so set them"
        )
    return found
