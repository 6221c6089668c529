from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actors.bench import FakePlanner
from support.demo_config import demo_config

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.plan_messages import PlanInfo
from dataservice.actors.planning_ahead import PLANNER_RESTARTS
from dataservice.actors.state_log import StateLog
from dataservice.errors import ServiceUnavailable


class DyingPlanner(FakePlanner):
    def __init__(self, ends: int) -> None:
        super().__init__()
        self._ends = ends

    async def open(self, config: str) -> PlanInfo:
        self._ends -= 1
        if self._ends >= 0:
            raise ServiceUnavailable("the planning process ended with code -9")
        return await super().open(config)


@pytest.mark.parametrize("ends", [PLANNER_RESTARTS, PLANNER_RESTARTS + 1])
def test_a_planning_process_that_ends_while_it_opens_the_plan_is_replaced(
    tmp_path: Path, ends: int
) -> None:
    async def start() -> int:
        log = StateLog(str(tmp_path / "journal"))
        coordinator = Coordinator(demo_config(tmp_path), DyingPlanner(ends), log)
        try:
            await coordinator.start()
        finally:
            await coordinator.stop()
        return coordinator.shared.counters["planners_lost"]

    if ends > PLANNER_RESTARTS:
        with pytest.raises(ServiceUnavailable, match="ended with code -9"):
            asyncio.run(start())
    else:
        assert asyncio.run(start()) == ends
