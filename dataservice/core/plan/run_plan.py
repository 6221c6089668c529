"""The steps of a plan as a run hands them out: without those that it passes over.

Invariants: step numbers are the run's and have no gaps; the cursor of a step says where the plan
was before anything was passed over for it, so a run may go on from it under exclusions that begin
there; without exclusions everything is the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataservice.core.cursor import Cursor
from dataservice.core.exclusions import Exclusions
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.core.tables import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    plan: Plan
    grid: Grid
    exclude: Exclusions

    def start_of(self, cursor: Cursor) -> Cursor:
        """Where the packs of the step at `cursor` are taken from.

        Plans every window that is passed over, as `Plan.skip`.
        """
        count = self.exclude.skipped_at(cursor.step)
        if not count:
            return cursor
        return replace(self.plan.skip(cursor, self.grid, count), step=cursor.step)

    def step(
        self, cursor: Cursor, lane_home: Sequence[int] | None = None, *, ranks_per_node: int = 1
    ) -> StepPlan | None:
        """As `Plan.step`."""
        return self.plan.step(
            self.start_of(cursor), self.grid, lane_home, ranks_per_node=ranks_per_node
        )

    def skip(self, cursor: Cursor, steps: int) -> Cursor:
        """As `Plan.skip`, of steps of the run."""
        stop = cursor.step + steps
        for skip in self.exclude.skips:
            if cursor.step <= skip.start < stop:
                cursor = self.plan.skip(cursor, self.grid, skip.start - cursor.step)
                cursor = self.plan.skip(self.start_of(cursor), self.grid, 1)
        return self.plan.skip(cursor, self.grid, stop - cursor.step)
