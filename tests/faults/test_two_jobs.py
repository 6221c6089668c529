"""Two services of different jobs on the same nodes do not disturb each other."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import demo_config, demo_settings, write_config
from support.harness import RESOURCE, Readers, read_ranks
from support.local_service import LocalService
from support.proof import clean_run, nothing_leaks, prove_same
from support.until import until

from dataservice.actors.ray_local import local_cluster
from dataservice.config import Config
from dataservice.errors import ConfigError, JobHeld
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus

JOBS = ("one", "two")
STEPS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return demo_config(tmp_path_factory.mktemp("jobs"))


def config_of(base: Config, job: str, folder: Path, state: str | None = None) -> Config:
    """Of job `job`: nothing else is its own but the journal."""
    staging = dataclasses.replace(base.staging, cache_dir=str(folder / "cache"))
    return dataclasses.replace(
        base, job=job, state_dir=str(folder / (state or job)), staging=staging
    )


def clean_of(base: Config) -> Readers:
    return clean_run(base, dp_size=2, micro_steps=2, steps=STEPS)


def read(endpoint: str, job: str, steps: int = STEPS, **more: Any) -> Readers:
    return read_ranks(endpoint, job=job, dp_size=2, micro_steps=2, steps=steps, **more)


def copied_once(services: list[LocalService]) -> bool:
    """By what their stagers have told by now; each has the whole cache in view."""
    stagers = [service.status()["stagers"][0] for service in services]
    copied = sum(stager["copied_shards"] for stager in stagers)
    return copied > 0 and {stager["cached_shards"] for stager in stagers} == {copied}


def test_with_one_cache_and_one_index_both_get_their_packs(base: Config, tmp_path: Path) -> None:
    clean = clean_of(base)
    configs = [config_of(base, job, tmp_path) for job in JOBS]
    with nothing_leaks(), ExitStack() as stack:
        services = [stack.enter_context(LocalService(config)) for config in configs]
        assert len({service.endpoint for service in services}) == 2
        with ThreadPoolExecutor(2) as pool:
            pairs = zip(services, JOBS, strict=True)
            runs = [pool.submit(read, service.endpoint, job) for service, job in pairs]
            readers = [run.result(100) for run in runs]
        for one in readers:
            prove_same(clean, one.deliveries)
            assert one.local_packs > 0  # each found its own worker's shared memory
        figures = [service.status() for service in services]
        for status in figures:
            assert status["counters"]["sessions"] == 1
            assert status["counters"].get("workers_lost", 0) == 0
            assert len(status["workers"]) == len(status["stagers"]) == 1
        until("every shard copied once, whichever job did it", lambda: copied_once(services))
    assert not [name for name in os.listdir(tmp_path / "cache") if "part" in name]


def test_one_that_ends_takes_nothing_from_the_other(base: Config, tmp_path: Path) -> None:
    clean = clean_of(base)
    first, second = (config_of(base, job, tmp_path) for job in JOBS)
    with nothing_leaks(), LocalService(second) as stays:
        ended = threading.Event()

        def note(batch: Any) -> None:
            if batch.step == 2:
                ended.wait(60)

        with ThreadPoolExecutor(1) as pool:
            with LocalService(first) as goes:
                run = pool.submit(read, stays.endpoint, "two", on_batch=note)
                prove_same(clean, read(goes.endpoint, "one").deliveries)
            at = time.monotonic()
            ended.set()
            readers = run.result(100)
        prove_same(clean, readers.deliveries)
        print(f"recovered in {max(d.at for d in readers.deliveries) - at:.1f} s")
        assert stays.status()["counters"].get("workers_lost", 0) == 0
        assert stays.status()["stagers"][0]["errors"] == 0


def test_what_belongs_to_one_job_is_refused_to_the_other(base: Config, tmp_path: Path) -> None:
    clean = clean_of(base)
    first = config_of(base, "one", tmp_path)
    with LocalService(first) as service:
        same_state = config_of(base, "two", tmp_path, state="one")
        with pytest.raises(JobHeld, match=r"is held by the coordinator of job one"):
            LocalService(same_state, workers=0)
        port = int(service.endpoint.rpartition(":")[2])
        other = config_of(base, "two", tmp_path)
        same_port = dataclasses.replace(
            other, serving=dataclasses.replace(other.serving, port=port)
        )
        with pytest.raises(ConfigError, match=r"cannot listen on .*: the port is in use"):
            LocalService(same_port, workers=0)
        with pytest.raises(ConfigError, match=r"job = 'two': this service runs job 'one'"):
            read(service.endpoint, "two", timeout_s=20.0)
        prove_same(clean, read(service.endpoint, "one").deliveries)
    with pytest.raises(ConfigError, match=r"holds the journal of job 'one', this is job 'two'"):
        LocalService(same_state, workers=0)


# ---- on Ray --------------------------------------------------------------------------------------


class Served:
    """`dataservice serve` of a job, in a process of its own."""

    def __init__(self, config_path: Path, address: str, log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "dataservice.cli", "serve", str(config_path)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--address", address, "--port", "0"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def endpoint(self) -> str:
        deadline = time.monotonic() + 90.0
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"serving on (\S+)", self._log.read_text(errors="replace")):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(self._log.read_text(errors="replace"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def served(config_path: Path, address: str, log: Path) -> Iterator[Served]:
    service = Served(config_path, address, log)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            os.killpg(service.process.pid, signal.SIGKILL)
        service.process.wait(10)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_services_on_one_ray_cluster(base: Config, tmp_path: Path) -> None:
    """On the same two nodes, with one cache directory; one of them ends while the other goes on."""
    clean = clean_of(base)
    paths = []
    for job in JOBS:
        folder = tmp_path / job
        settings = demo_settings(
            folder,
            workers={"count": 2, "resource": RESOURCE},
            staging={"cache_dir": str(tmp_path / "cache")},
        )
        settings |= {"job": job, "index_dir": base.index_dir}
        paths.append(write_config(folder, settings))
    with local_cluster(2, resource=RESOURCE, num_cpus=4) as cluster, nothing_leaks():
        with ExitStack() as stack:
            services = [
                stack.enter_context(served(path, cluster.address, tmp_path / f"{job}.log"))
                for path, job in zip(paths, JOBS, strict=True)
            ]
            endpoints = [service.endpoint() for service in services]
            ended = threading.Event()

            def note(batch: Any) -> None:
                if batch.step == 2:
                    ended.wait(120)

            with ThreadPoolExecutor(1) as pool:
                run = pool.submit(read, endpoints[1], "two", on_batch=note)
                prove_same(clean, read(endpoints[0], "one").deliveries)
                begun = time.monotonic()
                assert services[0].stop() == 0
                print(f"ended in {time.monotonic() - begun:.1f} s")
                ended.set()
                readers = run.result(120)
            prove_same(clean, readers.deliveries)
            with CoordinatorClient(endpoints[1]) as client:
                report = client.call(GetStatus(), 10.0)
            status = json.loads(report.status)
            assert status["job"] == "two" and status["counters"].get("workers_lost", 0) == 0
            assert len(status["workers"]) == len(status["stagers"]) == 2
            assert services[1].stop() == 0
    print(f"recovered in {max(d.at for d in readers.deliveries) - begun:.1f} s")
