"""A planning process that is stopped or killed: another plans on, and no trainer hears of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same

from dataservice.actors.planner_link import PlannerProcess

JOB, DP, MICRO, STEPS = "test", 2, 2, 12


@pytest.mark.parametrize("sig", [signal.SIGSTOP, signal.SIGKILL])
def test_another_one_plans_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sig: signal.Signals
) -> None:
    monkeypatch.setattr(PlannerProcess.__init__, "__kwdefaults__", {"deadline_s": 3.0})
    config = demo_config(tmp_path, staging={"cache_dir": None}, serving={"plan_ahead_steps": 2})
    clean = clean_run(config, dp_size=DP, micro_steps=MICRO, steps=STEPS)
    own = dataclasses.replace(config, state_dir=str(tmp_path / "other"))
    planners: list[int] = []
    count, lock = itertools.count(1), threading.Lock()

    def strike(_: Any) -> None:
        with lock:
            if next(count) == 8:
                planners.append(planner())
                os.kill(planners[0], sig)

    with nothing_leaks(), LocalService(own) as service:
        readers = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=DP,
            micro_steps=MICRO,
            steps=STEPS,
            on_batch=strike,
            timeout_s=60.0,
        )
        assert planner() != planners[0]
        assert service.status()["counters"]["planners_lost"] == 1
    prove_same(clean, readers.deliveries)
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")


def planner() -> int:
    """Of this process's service."""
    (found,) = (
        child.pid
        for child in psutil.Process().children()
        if "dataservice.actors.planner" in child.cmdline()
    )
    return found
