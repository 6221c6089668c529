"""Waits for workers are told from waits for the plan, over the real service without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService

from dataservice.actors import waits
from dataservice.actors.planning_ahead import PlanningAhead
from dataservice.actors.worker_tools import WorkerTools
from trainer_client import prefetch, session, watching

SLOW_S = 0.15


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalService]:
    monkeypatch.setattr(prefetch, "REPORT_S", 0.2)
    config = demo_config(tmp_path, serving={"plan_ahead_steps": 6})
    with LocalService(config) as service:
        yield service


def share_waited(service: LocalService, steps: int = 12) -> float:
    """Of the time of two ranks that take whatever they can get, for workers."""
    readers = read_ranks(
        service.endpoint, job="test", dp_size=2, micro_steps=2, steps=steps, prefetch_packs=2
    )
    assert readers.waited_s > 1.0  # they did wait, for whatever
    share: float = service.coordinator.shared.waits.share()
    return share


def test_waits_for_workers_that_build_slowly(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = WorkerTools.build

    def slow(self: WorkerTools, *arguments: Any) -> Any:
        time.sleep(SLOW_S)
        return build(self, *arguments)

    monkeypatch.setattr(WorkerTools, "build", slow)
    assert share_waited(service) > 0.5


def test_a_wait_is_told_while_it_lasts(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody seems to wait for packs that take long, but now and then."""
    monkeypatch.setattr(watching, "QUIET_S", 0.2)
    monkeypatch.setattr(watching, "LOOK_S", 0.1)
    monkeypatch.setattr(waits, "LEAST_S", 0.2)
    build, waiting = WorkerTools.build, threading.Event()
    shares: list[float] = []

    def slow(self: WorkerTools, *arguments: Any) -> Any:
        if waiting.is_set():
            for _ in range(8):
                time.sleep(0.5)
                shares.append(service.coordinator.shared.waits.share())
            waiting.clear()
        return build(self, *arguments)

    monkeypatch.setattr(WorkerTools, "build", slow)
    read_ranks(
        service.endpoint,
        job="test",
        dp_size=1,
        micro_steps=1,
        steps=24,
        prefetch_packs=1,
        on_batch=lambda batch: waiting.set() if batch.step == 4 else None,
    )
    assert min(shares[4:]) > 0.5


def test_a_worker_that_takes_long_is_no_lost_one(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks hear from it that their packs are not built yet."""
    monkeypatch.setattr(session, "BUILD_WAIT_S", 0.5)
    build = WorkerTools.build

    def slow(self: WorkerTools, *arguments: Any) -> Any:
        time.sleep(SLOW_S)
        return build(self, *arguments)

    monkeypatch.setattr(WorkerTools, "build", slow)
    readers = read_ranks(
        service.endpoint, job="test", dp_size=12, micro_steps=1, steps=2, prefetch_packs=1
    )
    assert readers.retries > 5
    counters = service.status()["counters"]
    assert (counters.get("workers_lost", 0), counters.get("packs_rebuilt", 0)) == (0, 0)


def test_waits_for_the_plan_are_not_for_workers(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_one = PlanningAhead._plan_one

    async def slow(self: PlanningAhead, *arguments: Any) -> None:
        await asyncio.sleep(4 * SLOW_S)
        await plan_one(self, *arguments)

    monkeypatch.setattr(PlanningAhead, "_plan_one", slow)
    assert share_waited(service) < 0.3


def test_a_worker_that_joins_in_the_middle_takes_its_share(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = read_ranks(service.endpoint, job="test", dp_size=2, micro_steps=2, steps=12)
    build = WorkerTools.build

    def slow(self: WorkerTools, *arguments: Any) -> Any:
        time.sleep(SLOW_S)
        return build(self, *arguments)

    monkeypatch.setattr(WorkerTools, "build", slow)
    joined = threading.Event()

    def join(batch: Any) -> None:
        if batch.step == 2 and not joined.is_set():
            joined.set()
            service.add_worker()

    readers = read_ranks(
        service.endpoint, job="test", dp_size=2, micro_steps=2, steps=12, on_batch=join
    )
    assert readers.digests_of_packs() == clean.digests_of_packs()
    assert len(readers.deliveries) == len(clean.deliveries) == 12 * 2 * 2
    served = [worker["served_packs"] for worker in service.status()["workers"]]
    assert len(served) == 2 and min(served) > 0
    assert service.status()["counters"]["packs_shared"] > 0
