"""The plan: which samples make which pack, and which pack goes to which cell of which step.

Invariants: everything is a pure function of (index, settings); a window depends on (digest, lane,
window number) alone; a step on (digest, cursor, grid, lane homes, ranks per node) alone. Packs of a
stream are ordered by (index in lane, lane), lanes that have ended skipped, so a cursor is a
function of the number of packs before it and not of the grids that led there. A step takes all its
packs from one phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.plan.check import check_settings, kind_grids
from dataservice.core.plan.digest import phase_digests, plan_digest
from dataservice.core.plan.placement import place_step
from dataservice.core.plan.stream import Stream
from dataservice.core.plan.walk import TakenPacks, Walk
from dataservice.core.settings import Grid, Kind, PlanSettings
from dataservice.core.tables import REASONS, IndexView, StepPlan, WindowPlan
from dataservice.errors import ResumeRefused

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """What a step takes from each stream."""

    phase: int
    packs: list[TakenPacks]
    first_pack: list[int]
    next_cursor: Cursor
    given_up: Ints
    """By source number."""


class Plan:
    """Random access to windows and steps. Thread-safe; keeps recently used windows."""

    def __init__(self, settings: PlanSettings, index: IndexView) -> None:
        """ConfigError names the setting that cannot be planned with."""
        check_settings(settings)
        self.settings = settings
        self._index = index
        kinds: tuple[Kind | None, ...] = ("text", "vision") if settings.segregate else (None,)
        self.streams = tuple(Stream(settings, index, kind) for kind in kinds)
        self._first_lane = np.cumsum([0, *(s.num_lanes for s in self.streams)]).tolist()
        self.num_lanes: int = self._first_lane[-1]
        """Of all streams; one stream's lanes come after the other's."""
        warnings = [text for stream in self.streams for text in stream.mixture.warnings]
        self.warnings = tuple(dict.fromkeys(warnings))
        self.phase_digests = phase_digests(settings, index, self.streams)
        """By phase, hex SHA-256 of all that its windows depend on and of where it begins: plans
        that agree in it give the same packs from any cursor in the phase, up to its end."""
        self.digest = plan_digest(settings, self.phase_digests, self.streams)
        """Hex SHA-256 over settings, index and PLAN_VERSION; not over grids or homes."""

    def start(self) -> Cursor:
        return self._phase_start(0)

    def windows_in(self, lane: int) -> int | None:
        """How many windows a lane has; None = endless."""
        stream, _ = self._stream_of(lane)
        return self.streams[stream].mixture.num_windows

    def window(self, lane: int, window: int) -> WindowPlan:
        """The packs of one window; it may hold none. ValueError for one that does not exist."""
        number, local = self._stream_of(lane)
        stream = self.streams[number]
        last = stream.mixture.num_windows
        if window < 0 or (last is not None and window >= last):
            raise ValueError(f"window {window} does not exist; lanes have {last}")
        planned = stream.window(local, window)
        return planned if local == lane else dataclasses.replace(planned, lane=lane)

    def samples(self, lane: int, window: int) -> tuple[Ints, Ints]:
        """(source number, row) of the samples of a window that exists, in no order that matters;
        asks the index for nothing, but in a segregated plan for the rows of a kind."""
        number, local = self._stream_of(lane)
        return self.streams[number].samples(local, window)

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
        a cursor that is not one of this plan's, ConfigError for a grid that its settings do not
        allow, ValueError for homes of a wrong shape or ranks_per_node that does not divide the
        DP size.
        """
        grids = kind_grids(self.settings, grid)
        if lane_home is not None and len(lane_home) != self.num_lanes:
            raise ValueError(f"lane_home has {len(lane_home)} lanes; the plan has {self.num_lanes}")
        taken = self._take(cursor, [kind.num_packs for kind in grids])
        if taken is None:
            return None
        by_lane = np.full(self.num_lanes, -1) if lane_home is None else np.asarray(lane_home)
        return place_step(
            cursor=cursor,
            next_cursor=taken.next_cursor,
            grid=grid,
            kind_grids=grids,
            packs=[
                packs.padded(kind.num_packs - len(packs.lane))
                for packs, kind in zip(taken.packs, grids, strict=True)
            ],
            first_packs=taken.first_pack,
            phase=taken.phase,
            pack_length=self.streams[0].phases[taken.phase].pack_length,
            lane_home=by_lane.astype(np.int64),
            settings=self.settings,
            ranks_per_node=ranks_per_node,
            given_up=taken.given_up,
        )

    def phase_of_step(self, cursor: Cursor, grid: Grid) -> int | None:
        """The phase that the step at a cursor is taken from, as `step` finds it; None at the end.

        Asks for the windows that the step begins with, and places nothing.
        """
        taken = self._take(cursor, [kind.num_packs for kind in kind_grids(self.settings, grid)])
        return None if taken is None else taken.phase

    def packs_per_cell(self, grid: Grid) -> tuple[int, ...]:
        """Of a step, by micro-step."""
        kinds = kind_grids(self.settings, grid)
        return tuple(kind.packs_per_cell for kind in kinds for _ in range(kind.micro_steps))

    def skip(self, cursor: Cursor, grid: Grid, steps: int) -> Cursor:
        """The cursor `steps` steps later, or at the end of the plan.

        Plans every window on the way, a few milliseconds for 2,000 samples.
        """
        counts = [kind.num_packs for kind in kind_grids(self.settings, grid)]
        for _ in range(steps):
            taken = self._take(cursor, counts)
            if taken is None:
                break
            cursor = taken.next_cursor
        return cursor

    def counts_in(self, step: StepPlan) -> dict[str, dict[str, int]]:
        """Source -> reason -> samples, of the windows that a step opens; see REASONS.

        Over the steps of a run a window counts once. What a phase gave up just before the step
        counts with it.
        """
        first = step.cursor.phase != step.phase or step.cursor.num_packs == 0
        before = self._phase_start(step.phase, step.cursor) if first else step.cursor
        counts = np.zeros((len(REASONS), len(self._index.sources)), dtype=np.int64)
        counts[REASONS.index("cut")] = step.given_up
        for number, stream in enumerate(self.streams):
            here, there = (self._places(number, cursor) for cursor in (before, step.next_cursor))
            counts += stream.counts_between(step.phase, here, there, first=first)
        return {
            stats.name: {
                reason: int(count)
                for reason, count in zip(REASONS, counts[:, number].tolist(), strict=True)
                if count
            }
            for number, stats in enumerate(self._index.sources)
            if counts[:, number].any()
        }

    def left_over(self, cursor: Cursor) -> dict[str, int]:
        """Source -> samples that no step takes, at a cursor where `step` answers None."""
        lost = self._given_up(cursor)
        for phase in range(cursor.phase + 1, len(self.phase_digests)):
            lost += self._given_up(self._phase_start(phase, cursor))
        return {
            stats.name: int(count)
            for stats, count in zip(self._index.sources, lost, strict=True)
            if count
        }

    def _stream_of(self, lane: int) -> tuple[int, int]:
        """(stream, its lane) of a lane."""
        if not 0 <= lane < self.num_lanes:
            raise ValueError(f"lane {lane} does not exist; the plan has {self.num_lanes} lanes")
        number = int(np.searchsorted(self._first_lane, lane, side="right")) - 1
        return number, lane - self._first_lane[number]

    def _phase_start(self, phase: int, here: Cursor | None = None) -> Cursor:
        return Cursor(
            step=here.step if here else 0,
            phase=phase,
            next_pack=here.next_pack if here else (0,) * len(self.streams),
            lanes=tuple(
                (stream.phases[phase].first_window, 0)
                for stream in self.streams
                for _ in range(stream.num_lanes)
            ),
            next_lane=(0,) * len(self.streams),
        )

    def _places(self, stream: int, cursor: Cursor) -> tuple[tuple[int, int], ...]:
        return cursor.lanes[self._first_lane[stream] : self._first_lane[stream + 1]]

    def _walks(self, cursor: Cursor) -> list[Walk]:
        return [
            stream.walk(cursor.phase, self._places(number, cursor), cursor.next_lane[number])
            for number, stream in enumerate(self.streams)
        ]

    def _check_cursor(self, cursor: Cursor) -> None:
        streams = len(self.streams)
        shape = (len(cursor.lanes), len(cursor.next_pack), len(cursor.next_lane))
        if (
            shape != (self.num_lanes, streams, streams)
            or not 0 <= cursor.phase < len(self.phase_digests)
            or any(window < 0 or offset < 0 for window, offset in cursor.lanes)
            or not all(
                0 <= lane < stream.num_lanes
                for lane, stream in zip(cursor.next_lane, self.streams, strict=True)
            )
        ):
            raise ResumeRefused(
                f"the cursor of step {cursor.step} names phase {cursor.phase}, {len(cursor.lanes)} "
                f"lanes and next lane {cursor.next_lane}; this plan has "
                f"{len(self.phase_digests)} phases and {self.num_lanes} lanes: resume with the "
                "plan that wrote the cursor"
            )
        cut = self._cut_at(cursor.phase)
        if cut is not None and cursor.num_packs > cut:
            raise ResumeRefused(
                f"the cursor of step {cursor.step} is at pack {cursor.num_packs}, and phase "
                f"{cursor.phase} of this plan is cut at pack {cut}: cut it at pack "
                f"{cursor.num_packs} or later, or resume with the plan that wrote the cursor"
            )

    def _cut_at(self, phase: int) -> int | None:
        """Packs of the plan after which a phase gives up the rest."""
        return self.streams[0].phases[phase].last_pack

    def _take(self, cursor: Cursor, counts: list[int]) -> _Taken | None:
        """The next packs of each stream, from the first phase that has any; None at the end."""
        self._check_cursor(cursor)
        given_up = np.zeros(len(self._index.sources), dtype=np.int64)
        here = cursor
        while True:
            walks = self._walks(here)
            cut = self._cut_at(here.phase)
            total = sum(counts)
            left = total if cut is None else min(total, max(0, cut - here.num_packs))
            packs = [
                walk.take(count * left // total) for walk, count in zip(walks, counts, strict=True)
            ]
            full = all(len(p.lane) == n for p, n in zip(packs, counts, strict=True))
            some = any(len(p.lane) for p in packs)
            if full or (some and self.settings.remainder == "pad"):
                for first, taken in zip(self._first_lane, packs, strict=False):
                    taken.lane[:] += first
                for number, walk in enumerate(walks):
                    self.streams[number].keep(self._places(number, here), walk.places)
                return _Taken(
                    phase=here.phase,
                    packs=packs,
                    first_pack=list(here.next_pack),
                    next_cursor=_after(here, walks),
                    given_up=given_up,
                )
            if here.phase + 1 == len(self.phase_digests):
                return None
            given_up += self._given_up(here)
            here = self._phase_start(here.phase + 1, here)

    def _given_up(self, here: Cursor) -> Ints:
        """What is left of a phase that is left behind."""
        lost = np.zeros(len(self._index.sources), dtype=np.int64)
        untouched = here.lanes == self._phase_start(here.phase).lanes
        for number, stream in enumerate(self.streams):
            places = self._places(number, here)
            lost += stream.given_up(here.phase, places, untouched=untouched)
        return lost


def _after(here: Cursor, walks: list[Walk]) -> Cursor:
    """The cursor one step later."""
    taken = zip(here.next_pack, walks, strict=True)
    return Cursor(
        step=here.step + 1,
        phase=here.phase,
        next_pack=tuple(done + walk.taken for done, walk in taken),
        lanes=tuple(place for walk in walks for place in walk.places),
        next_lane=tuple(walk.next_lane for walk in walks),
    )
