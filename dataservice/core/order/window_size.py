"""How many lanes there are and how many samples a window of a lane has, set or `auto`.

Invariants: integers and exact fractions decide; what is set is kept as it is; the mean length of
samples is looked at only where `auto` or a warning needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from dataservice.core.settings import PlanSettings

MAX_AUTO_LANES = 32
AUTO_WINDOW_PACKS = 256
_FEW_PACKS = 64
_MANY_PACKS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSize:
    settings: PlanSettings
    pack_length: int
    """The longest of all phases."""
    epoch: Fraction
    """Samples of an epoch of the first phase."""
    mean: Callable[[], Fraction]
    """Tokens of a sample of the first phase, filler behind it with them."""

    def lanes_and_window(self) -> tuple[int, int]:
        """Lanes (a power of two) and samples a window and lane.

        A window is 256 packs and lanes * window at most a quarter of an epoch; where an epoch is
        too small for that, lanes give way first.
        """
        lanes, window = self.settings.lanes, self.settings.window
        if lanes is not None and window is not None:
            return lanes, window
        quarter = math.floor(self.epoch / 4)
        if lanes is None:
            least = window or self._samples_of(AUTO_WINDOW_PACKS)
            lanes = MAX_AUTO_LANES
            while lanes > 1 and lanes * least > quarter:
                lanes //= 2
        if window is None:
            window = max(1, min(self._samples_of(AUTO_WINDOW_PACKS), quarter // lanes))
        return lanes, window

    def warnings(self, lanes: int, window: int) -> list[str]:
        """What is unwise in settings made by hand; `auto` does what the data allows."""
        if self.settings.lanes is None and self.settings.window is None:
            return []
        found = []
        size = math.floor(self.epoch)
        if lanes * window * 4 > self.epoch:
            found.append(
                f"lanes {lanes} x window {window} = {lanes * window} samples is more than a "
                f"quarter of an epoch ({size} samples): windows are few, and an epoch's last is "
                "far from full"
            )
        if lanes > size:
            found.append(
                f"lanes {lanes} exceeds the {size} samples of an epoch: some lanes are empty"
            )
        mean = self.mean()
        packs = math.floor(window * mean / self.pack_length)
        if packs < _FEW_PACKS or packs > _MANY_PACKS:
            harm = "packs fill badly" if packs < _FEW_PACKS else "planning needs memory and time"
            found.append(
                f"window {window} is about {packs} packs of {self.pack_length} tokens "
                f"({float(mean):.0f} tokens a sample); {harm}, some hundreds of packs are usual"
            )
        return found

    def _samples_of(self, packs: int) -> int:
        mean = self.mean()
        return max(1, math.floor(packs * self.pack_length / mean) if mean > 0 else packs)
