"""The plan: which samples make which pack, and which pack goes to which cell of which step.

Invariants: everything is a pure function of (index, settings); a window depends on
(digest, lane, window number) alone; a step on (digest, cursor, grid, lane homes, ranks per node)
alone. Packs are ordered by (index in lane, lane), lanes that have ended skipped, so a cursor is a
function of the number of packs before it and not of the grids that led there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.core.balance import arrival, assign, lockstep_of
from dataservice.core.bounds import lockstep
from dataservice.core.cursor import Cursor
from dataservice.core.lru import LRUCache
from dataservice.core.mixing import Mixture, build_mixture
from dataservice.core.settings import BalanceSettings, Grid, PlanSettings
from dataservice.core.tables import IndexView, SampleColumns, SourceStats, StepPlan, WindowPlan
from dataservice.core.walk import TakenPacks, Walk
from dataservice.core.windows import plan_window
from dataservice.errors import ConfigError, ResumeRefused

__all__ = [
    "PLAN_VERSION",
    "IndexView",
    "Plan",
    "SampleColumns",
    "SourceStats",
    "StepPlan",
    "WindowPlan",
]

PLAN_VERSION = 1

_CACHED_SAMPLES = 2_000_000  # in cached windows, about 50 bytes each

Ints = NDArray[np.int64]


class Plan:
    """Random access to windows and steps. Thread-safe; keeps recently used windows."""

    def __init__(self, settings: PlanSettings, index: IndexView) -> None:
        """ConfigError names the setting that cannot be planned with."""
        _check(settings)
        self.settings = settings
        self._index = index
        self._mixture = build_mixture(settings, index)
        self.num_lanes = self._mixture.num_lanes
        self.window_samples = self._mixture.window_samples
        self.num_windows = self._mixture.num_windows
        """Of each lane; None = endless."""
        self.warnings = self._mixture.warnings
        self.digest = _digest(settings, index, self._mixture)
        """Hex SHA-256 over settings, index and PLAN_VERSION; not over grids or homes."""
        kept = _CACHED_SAMPLES // self.window_samples
        self._windows: LRUCache[tuple[int, int], WindowPlan] = LRUCache(
            max(self.num_lanes + 1, min(4 * self.num_lanes, kept))
        )
        self._ended_at: dict[int, int] = {}
        """Lane -> a window from which on it has no pack."""

    def start(self) -> Cursor:
        lanes = ((0, 0),) * self.num_lanes
        return Cursor(step=0, next_pack=0, lanes=lanes, next_lane=0)

    def window(self, lane: int, window: int) -> WindowPlan:
        """The packs of one window; it may hold none. ValueError for one that does not exist."""
        if not 0 <= lane < self.num_lanes:
            raise ValueError(f"lane {lane} does not exist; the plan has {self.num_lanes} lanes")
        if window < 0 or (self.num_windows is not None and window >= self.num_windows):
            raise ValueError(f"window {window} does not exist; lanes have {self.num_windows}")
        return self._windows.get(
            (lane, window),
            lambda: plan_window(self.settings, self._index, self._mixture, lane, window),
        )

    def step(
        self,
        cursor: Cursor,
        grid: Grid,
        lane_home: Sequence[int] | None = None,
        *,
        ranks_per_node: int = 1,
    ) -> StepPlan | None:
        """The step at a cursor; None when nothing is left for one.

        lane_home[l] is the node that stages lane l, -1 = nowhere; None = all -1. ResumeRefused for
        a cursor that is not one of this plan's, ValueError for a grid or homes of a wrong shape.
        """
        _check_grid(grid)
        if lane_home is not None and len(lane_home) != self.num_lanes:
            raise ValueError(f"lane_home has {len(lane_home)} lanes; the plan has {self.num_lanes}")
        walk = self._walk(cursor)
        packs = walk.take(grid.num_packs)
        short = grid.num_packs - len(packs.lane)
        if len(packs.lane) == 0 or (short and self.settings.remainder == "drop"):
            return None
        by_lane = np.full(self.num_lanes, -1) if lane_home is None else np.asarray(lane_home)
        padding = np.full(short, -1, dtype=np.int64)
        return _placed(
            cursor,
            walk.cursor(steps=1),
            grid,
            packs.padded(short),
            np.append(by_lane[packs.lane].astype(np.int64), padding),
            self.settings.balance,
            ranks_per_node,
        )

    def advance(self, cursor: Cursor, num_packs: int, *, steps: int = 0) -> Cursor:
        """The cursor `num_packs` later, or at the end of the plan; `steps` is added to its step.

        Plans every window on the way, about a millisecond for 2,000 samples.
        """
        walk = self._walk(cursor)
        walk.take(num_packs)
        return walk.cursor(steps=steps)

    def dropped_in(self, step: StepPlan) -> dict[str, int]:
        """Samples by source that are in no pack, of the windows whose first pack is in `step`:
        those with images that are longer than a pack, and empty ones."""
        dropped: dict[str, int] = {}
        for i in np.flatnonzero((step.lane >= 0) & (step.number == 0)).tolist():
            window = self.window(int(step.lane[i]), int(step.window[i]))
            counts = window.dropped_oversize + window.dropped_empty
            for source in np.flatnonzero(counts).tolist():
                name = self._index.sources[source].name
                dropped[name] = dropped.get(name, 0) + int(counts[source])
        return dropped

    def _walk(self, cursor: Cursor) -> Walk:
        places_ok = len(cursor.lanes) == self.num_lanes and all(
            window >= 0
            and offset >= 0
            and (self.num_windows is None or window + (offset > 0) <= self.num_windows)
            for window, offset in cursor.lanes
        )
        if not places_ok or not 0 <= cursor.next_lane < self.num_lanes:
            raise ResumeRefused(
                f"the cursor of step {cursor.step} names {len(cursor.lanes)} lanes and next lane "
                f"{cursor.next_lane}; this plan has {self.num_lanes} lanes of {self.num_windows} "
                "windows: resume with the plan that wrote the cursor"
            )
        return Walk(cursor, self._next_pack)

    def _next_pack(self, lane: int, window: int, offset: int) -> tuple[WindowPlan, int] | None:
        """The first pack of a lane at or after (window, offset); None when it has ended.

        A lane of an endless run has ended when no window of a whole pass over its samples holds a
        pack: it has no samples, or none that fits a pack.
        """
        if self.num_windows is not None:
            end = self.num_windows
        else:
            end = window + self._mixture.windows_to_read_all(lane)
        end = min(end, self._ended_at.get(lane, end))
        for number in range(window, end):
            planned = self.window(lane, number)
            if offset and offset >= planned.num_packs:
                raise ResumeRefused(
                    f"the cursor names pack {offset} of window {number} of lane {lane}, which has "
                    f"{planned.num_packs} packs: resume with the plan that wrote the cursor"
                )
            if planned.num_packs:
                return planned, offset
        self._ended_at[lane] = min(window, self._ended_at.get(lane, window))
        return None


def _placed(
    cursor: Cursor,
    next_cursor: Cursor,
    grid: Grid,
    packs: TakenPacks,
    home: Ints,
    balance: BalanceSettings,
    ranks_per_node: int,
) -> StepPlan:
    as_dealt = arrival(grid.num_packs, dp_size=grid.dp_size, packs_per_cell=grid.packs_per_cell)
    lockstep_arrival = int(
        lockstep_of(packs.cost, *as_dealt, dp_size=grid.dp_size, micro_steps=grid.micro_steps)
    )
    if balance.enabled:
        found = assign(
            packs.cost,
            home,
            dp_size=grid.dp_size,
            micro_steps=grid.micro_steps,
            ranks_per_node=ranks_per_node,
            sync_domain=balance.sync_domain,
            tolerance=balance.tolerance,
            packs_per_cell=grid.packs_per_cell,
        )
        micro_step, dp_rank, moved = found.micro_step, found.dp_rank, found.moved
        cost, bound = int(found.lockstep), int(found.lockstep_bound)
    else:
        micro_step, dp_rank = as_dealt
        known = (home >= 0) & (home < grid.dp_size // ranks_per_node)
        moved = int((known & (dp_rank // ranks_per_node != home)).sum())
        cost = lockstep_arrival
        bound = int(lockstep(packs.cost, grid.dp_size, grid.packs_per_cell))
    return StepPlan(
        step=cursor.step,
        grid=grid,
        cursor=cursor,
        next_cursor=next_cursor,
        lane=packs.lane,
        window=packs.window,
        number=packs.number,
        tokens=packs.tokens,
        image_tokens=packs.image_tokens,
        num_images=packs.num_images,
        num_patches=packs.num_patches,
        loss_tokens=packs.loss_tokens,
        cost=packs.cost,
        home=home,
        micro_step=micro_step,
        dp_rank=dp_rank,
        lockstep_cost=cost,
        lockstep_bound=bound,
        lockstep_arrival=lockstep_arrival,
        moved=moved,
    )


def _check(settings: PlanSettings) -> None:
    """Bounds that a single setting must keep; what depends on the data is checked with it."""
    least_one = ("pack_length", "open_bins", "image_token_cap", "p_ref", "lanes", "window")
    for name in (*least_one, "segment", "open_segments", "epochs"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"plan: {name} is {value}; it must be at least 1")
    known: dict[str, tuple[str, ...]] = {
        "packer": ("next_fit", "best_fit", "lbf"),
        "cost": ("vit_cost", "image_tokens"),
        "weight_by": ("samples", "tokens"),
        "oversize": ("split",),
        "remainder": ("pad", "drop"),
    }
    for name, values in known.items():
        if getattr(settings, name) not in values:
            raise ConfigError(
                f"plan: {name} is {getattr(settings, name)!r}; it must be one of {values}"
            )


def _check_grid(grid: Grid) -> None:
    for name in ("dp_size", "micro_steps", "packs_per_cell"):
        if getattr(grid, name) < 1:
            raise ValueError(f"grid: {name} is {getattr(grid, name)}; it must be at least 1")


def _digest(settings: PlanSettings, index: IndexView, mixture: Mixture) -> str:
    content = {
        "plan_version": PLAN_VERSION,
        "settings": dataclasses.asdict(settings),
        "lanes": mixture.num_lanes,
        "window": mixture.window_samples,
        "index": index.fingerprint,
        "sources": [dataclasses.asdict(stats) for stats in index.sources],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
