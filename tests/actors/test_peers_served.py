"""Peers and the real service: what workers build and keep for them, without Ray."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config
from support.local_service import LocalService

from dataservice.config import Config
from trainer_client import PackStream, ParallelLayout, relay


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    workers, plan = {"ready_bytes": "1 MiB"}, {"pack_length": 8192}
    return demo_config(tmp_path_factory.mktemp("peers"), workers=workers, plan=plan)


@pytest.fixture
def config(base: Config, tmp_path: Path) -> Config:
    staging = dataclasses.replace(base.staging, cache_dir=str(tmp_path / "cache"))
    return dataclasses.replace(base, state_dir=str(tmp_path / "state"), staging=staging)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to fetch twice."""
    monkeypatch.setattr(relay, "WAIT_S", 60.0)


@contextmanager
def peers(service: LocalService, hosts: str, *, run_id: str) -> Iterator[list[PackStream]]:
    """Open streams of one rank, a peer on each of these hosts."""
    streams = [
        PackStream(
            service.endpoint,
            job="test",
            layout=ParallelLayout(rank=rank, tp=len(hosts)),
            micro_steps=2,
            run_id=run_id,
            host=host,
            prefetch_packs=2,
            timeout_s=60,
            digests=True,
        )
        for rank, host in enumerate(hosts)
    ]
    threads = [threading.Thread(target=stream.open) for stream in streams]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        yield streams
    finally:
        for stream in streams:
            stream.close()


def read_in_turn(streams: Sequence[PackStream], *, lead: int) -> list[list[tuple[Any, ...]]]:
    """To the end; the first half of them is `lead` batches ahead of the others, as an early stage
    of a pipeline is. What each got."""
    logs: list[list[tuple[Any, ...]]] = [[] for _ in streams]
    early = len(streams) // 2
    for turn in count():
        ended = 0
        for number, stream in enumerate(streams):
            if number >= early and turn < lead:
                continue
            batch = next(stream, None)
            if batch is None:
                ended += 1
            else:
                meta = batch.meta
                logs[number].append((meta["step"], *meta["pack_numbers"], *meta["digests"]))
        if ended == len(streams):
            return logs
    raise AssertionError


def built_packs(service: LocalService) -> int:
    """Once no worker has more to tell."""
    last, deadline = -1, time.monotonic() + 20
    while time.monotonic() < deadline:
        built = sum(worker["built_packs"] for worker in service.status()["workers"])
        if built == last:
            return int(built)
        last = built
        time.sleep(1.5)
    raise AssertionError("the workers went on building")


def test_packs_are_built_once_and_fetched_once_a_host(config: Config) -> None:
    with LocalService(config) as service:
        with peers(service, "aabb", run_id="run") as streams:
            logs = read_in_turn(streams, lead=2)
            relayed = [stream.stats().relayed_packs for stream in streams]
            fetched = [s.stats().received_packs - s.stats().relayed_packs for s in streams]
        built = built_packs(service)
        served = sum(worker["served_packs"] for worker in service.status()["workers"])
    assert logs.count(logs[0]) == 4
    packs = [numbers for _, *numbers in logs[0] if numbers[0] >= 0]
    assert len(packs) > 40
    assert relayed == [0, len(packs), 0, len(packs)]
    # a few may have made room while one host ran ahead; most of all, if served packs did not stay
    assert len(packs) <= built < 1.2 * len(packs)
    assert served == 2 * len(packs) and fetched[0] == fetched[2] >= len(packs)


def test_a_worker_that_is_lost_costs_peers_nothing_but_time(config: Config) -> None:
    with LocalService(config, workers=2) as service:
        first = next(iter(service.workers))
        with peers(service, "aab", run_id="run") as streams:
            logs: list[list[Any]] = [[] for _ in streams]
            for number, batches in enumerate(zip(*streams, strict=True)):
                if number == 10:
                    service.cut_worker(first)
                for log, batch in zip(logs, batches, strict=True):
                    log.append((batch.meta["pack_numbers"], batch.meta["digests"]))
        status = service.status()
    assert logs.count(logs[0]) == 3 and len(logs[0]) > 40
    assert status["session"]["peers"] == 3
    assert status["counters"]["workers_lost"] == 1
