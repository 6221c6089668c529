"""Steps of a plan and their packs, in this process, where no service runs.

Invariants: nothing is written but what a lazy index counts; packs are built as a worker builds
them, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dataservice.actors.build_queue import Job
from dataservice.actors.pack_specs import spec_of
from dataservice.actors.plan_messages import PlannedStep, StepRequest
from dataservice.actors.planner import Planner, cursor_state
from dataservice.actors.state_log import Homes
from dataservice.actors.steps import ActiveStep
from dataservice.actors.worker_tools import WorkerTools
from dataservice.config import Config
from dataservice.core.cursor import Cursor
from dataservice.core.packspec import PackSpec
from dataservice.core.plan.run_plan import RunPlan
from dataservice.core.settings import Grid
from dataservice.errors import ServiceUnavailable
from dataservice.pipeline.materialize import BuiltPack
from dataservice.storage.lazy import BlocksMissing

STEPS_AT_ONCE = 100
"""That are planned between two words of progress."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPack:
    """A pack that was built, and where it belongs."""

    micro_step: int
    dp_rank: int
    place: int
    """In its micro-batch."""
    number: int
    """Global pack number, -1 for a padding pack."""
    cost: int
    spec: PackSpec
    built: BuiltPack


class OfflineSteps:
    """Of one config and grid. Close it at the end."""

    def __init__(self, config: Config, grid: Grid, *, say: Say) -> None:
        """`say` is told what to know about them, in words."""
        self.config = config
        self.grid = grid
        self._say = say
        self.planner = Planner(config)
        self._tools: WorkerTools | None = None
        self._run = RunPlan(plan=self.planner.plan, grid=grid, exclude=config.exclude)

    @property
    def plan_digest(self) -> str:
        return self.planner.plan.digest

    @property
    def renderer(self) -> Any:
        return self.planner.renderer

    def close(self) -> None:
        if self._tools is not None:
            self._tools.close()
        self.planner.close()

    def skipped_to(self, cursor: Cursor, step: int) -> Cursor:
        """The cursor of a later step, or of the end of the data."""
        while cursor.step < step:
            if step - cursor.step > STEPS_AT_ONCE:
                self._say(f"planning from step {cursor.step:,} to {step:,}")
            count = min(STEPS_AT_ONCE, step - cursor.step)
            further = self._counted(partial(self._run.skip, cursor, count))
            if further.step == cursor.step:
                break
            cursor = further
        return cursor

    def step(self, cursor: Cursor, homes: Homes | None = None) -> ActiveStep | None:
        """The step at a cursor; None at the end. `homes` as the state log has them."""
        plan = self.planner.plan
        per_node, lane_homes = homes or (0, (-1,) * plan.num_lanes)
        request = StepRequest(
            cursor=cursor_state(plan, cursor, lane_homes, per_node),
            dp_size=self.grid.dp_size,
            micro_steps=self.grid.micro_steps,
            packs_per_cell=self.grid.packs_per_cell,
        )
        planned: PlannedStep = self._counted(partial(self.planner.step, request))
        if planned.end:
            return None
        patch_bytes = self.config.plan.vision.patch_bytes
        return ActiveStep(request.cursor, planned, self.grid, patch_bytes=patch_bytes)

    def packs(
        self,
        active: ActiveStep,
        ranks: Sequence[int],
        holes_of: Callable[[ActiveStep, int], dict[str, str]] = ActiveStep.excluded,
    ) -> Iterator[PlacedPack]:
        """Of some ranks, in the order of micro-steps; `holes_of` a pack are not read."""
        for micro_step in range(self.grid.micro_steps):
            for dp_rank in ranks:
                for place, i in enumerate(active.packs_of_cell(micro_step, dp_rank)):
                    spec = spec_of(active.planned.specs[i])
                    yield PlacedPack(
                        micro_step=micro_step,
                        dp_rank=dp_rank,
                        place=place,
                        number=active.number(i),
                        cost=int(active.cost[i]),
                        spec=spec,
                        built=self._build(active, i, spec, holes_of(active, i)),
                    )

    def _counted(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives, with the blocks of a lazy index that it needs counted here."""
        while True:
            try:
                return ask()
            except BlocksMissing as missing:
                assert self.planner.lazy is not None
                failed = self.planner.lazy.count(missing.keys).failed
                if failed:
                    raise ServiceUnavailable(failed[0].reason) from None

    def _build(
        self, active: ActiveStep, i: int, spec: PackSpec, holes: dict[str, str]
    ) -> BuiltPack:
        if self._tools is None:
            self._tools = WorkerTools(
                self.config, on_change=lambda: None, ask=_nobody, seat=lambda: ("offline", 0)
            )
        job = Job(
            session=0,
            pack_id=spec.pack_id,
            need=(active.step, int(active.micro_step[i]), int(active.dp_rank[i])),
            spec=spec,
            holes=holes,
            storage_holes=False,
            size_bytes=active.size_bytes(i),
        )
        return self._tools.build(job, job.holes)


def _nobody(_request: object) -> Any:
    raise ServiceUnavailable("there is no coordinator here")
