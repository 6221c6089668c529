"""One stream of packs: all samples of the plan, or those of one kind, by lane, window and phase.

Invariants: a window is a function of (settings, index, kind, lane, window number); a phase is the
same range of windows in every lane, and a walk never leaves the phase it began in.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache
from dataservice.core.order.mixing import PhaseMix, build_mixture
from dataservice.core.plan.walk import Walk
from dataservice.core.plan.windows import plan_window, window_rows
from dataservice.core.settings import Kind, PlanSettings
from dataservice.core.tables import REASONS, IndexView, WindowPlan
from dataservice.errors import ResumeRefused

_CACHED_SAMPLES = 2_000_000  # in cached windows, about 60 bytes each

Places = Sequence[tuple[int, int]]


class Stream:
    """Thread-safe; keeps recently used windows."""

    def __init__(self, settings: PlanSettings, index: IndexView, kind: Kind | None) -> None:
        self._settings = settings
        self._index = index
        self.mixture = build_mixture(settings, index, kind)
        self.num_lanes = self.mixture.num_lanes
        kept = _CACHED_SAMPLES // self.mixture.window_samples
        self._windows: LRUCache[tuple[int, int], WindowPlan] = LRUCache(
            max(self.num_lanes + 1, min(4 * self.num_lanes, kept))
        )
        self._ended_at: dict[tuple[int, int], int] = {}
        """(phase, lane) -> a window from which on it has no pack in the phase."""

    @property
    def phases(self) -> tuple[PhaseMix, ...]:
        return self.mixture.phases

    def window(self, lane: int, window: int) -> WindowPlan:
        return self._windows.get(
            (lane, window),
            lambda: plan_window(self._settings, self._index, self.mixture, lane, window),
        )

    def keep(self, before: Places, after: Places) -> None:
        """Keeps as many windows as a step that goes from some places to others reads, for they are
        asked for again when its packs are described and counted."""
        read = sum(there[0] + 1 - here[0] for here, there in zip(before, after, strict=True))
        self._windows.keep(read + self.num_lanes)

    def samples(self, lane: int, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source number, row in the index) of a window's samples, source by source."""
        return window_rows(self._index, self.mixture, lane, window)

    def walk(self, phase: int, places: Places, next_lane: int) -> Walk:
        """Over what is left of a phase; ResumeRefused for places that are not in it."""
        rules = self.phases[phase]
        for lane, (window, offset) in enumerate(places):
            if window < rules.first_window or not self._holds(rules, window, offset):
                end = rules.end_window
                to = "on" if end is None else f"to {end - 1}"
                raise ResumeRefused(
                    f"the cursor is at pack {offset} of window {window} of lane {lane}, and phase "
                    f"{phase} of this plan has windows {rules.first_window} {to}: resume with the "
                    "plan that wrote the cursor, or let the phase end after it"
                )
        return Walk(
            places,
            next_lane,
            lambda *place: self._next_pack(rules, *place),
            lambda windows: self._plan_at_once(rules, windows),
        )

    def _plan_at_once(self, phase: PhaseMix, windows: list[tuple[int, int]]) -> None:
        """Those that are not at hand, in as many threads as there are CPUs; most of the work is
        compiled code, which threads run side by side."""
        end = phase.end_window
        missing = [
            (lane, window)
            for lane, window in windows
            if (lane, window) not in self._windows
            and (end is None or window < end)
            and window < self._ended_at.get((phase.number, lane), window + 1)
        ]
        if len(missing) > 1 and (threads := min(len(missing), _num_cpus())) > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda place: self.window(*place), missing))

    def given_up(self, phase: int, places: Places, *, untouched: bool) -> NDArray[np.int64]:
        """By source number: samples that a phase has from `places` on. Those in packs of windows
        that are open, all of later windows; of lanes that have ended only where the phase is
        `untouched`, for `counts_between` has counted them with its first step."""
        rules = self.phases[phase]
        lost = np.zeros(len(self._index.sources), dtype=np.int64)
        for lane, (first, offset) in enumerate(places):
            if rules.end_window is None:
                continue
            if not untouched and self._next_pack(rules, lane, first, offset) is None:
                continue
            if offset:
                window = self.window(lane, first)
                begin = window.item_offsets[offset]
                samples = window.row[begin:] * len(lost) + window.source[begin:]
                lost += np.bincount(np.unique(samples) % len(lost), minlength=len(lost))
            unopened = range(first + (offset > 0), rules.end_window)
            self.mixture.in_lane(rules, lane).add_samples(unopened, lost)
        return lost

    def counts_between(
        self, phase: int, before: Places, after: Places, *, first: bool
    ) -> NDArray[np.int64]:
        """[reason, source number] of the windows that a step opens or passes, in the lanes that end
        with it also of those without a pack that are left; `first` is the phase's first step."""
        rules = self.phases[phase]
        counts = np.zeros((len(REASONS), len(self._index.sources)), dtype=np.int64)
        for lane, (here, there) in enumerate(zip(before, after, strict=True)):
            stop = there[0] + (there[1] > 0)
            moved = first or here != there
            if moved and rules.end_window is not None and not self._next_pack(rules, lane, *there):
                stop = rules.end_window
            for number in range(here[0] + (here[1] > 0), stop):
                counts += self.window(lane, number).counts
        return counts

    @staticmethod
    def _holds(phase: PhaseMix, window: int, offset: int) -> bool:
        return phase.end_window is None or window + (offset > 0) <= phase.end_window

    def _next_pack(
        self, phase: PhaseMix, lane: int, window: int, offset: int
    ) -> tuple[WindowPlan, int] | None:
        """The first pack of a lane at or after (window, offset); None when the phase has ended.

        A lane of an endless phase has ended when no window of a whole pass over its samples holds a
        pack: it has no samples, or none that fits a pack.
        """
        key = (phase.number, lane)
        ends = [phase.end_window, self._ended_at.get(key)]
        if self._settings.epochs is None:
            ends.append(window + self.mixture.in_lane(phase, lane).windows_to_read_all)
        end = min(end for end in ends if end is not None)
        for number in range(window, end):
            planned = self.window(lane, number)
            if offset and offset >= planned.num_packs:
                raise ResumeRefused(
                    f"the cursor names pack {offset} of window {number} of lane {lane}, which has "
                    f"{planned.num_packs} packs: resume with the plan that wrote the cursor"
                )
            if planned.num_packs:
                return planned, offset
        self._ended_at[key] = min(window, self._ended_at.get(key, window))
        return None


def _num_cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
