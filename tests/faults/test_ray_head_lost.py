"""Ray's head is killed without grace: trainers end with ServiceUnavailable and their cursor intact;
served again on a new cluster, they go on in the same order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_config import demo_config
from support.harness import RESOURCE, Delivery, delivery_of
from support.proof import clean_run, nothing_leaks, prove_same
from support.service_processes import free_port

from dataservice.actors.ray_local import local_cluster
from dataservice.errors import DataServiceError, ServiceUnavailable
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus, StatusReport
from trainer_client import PackStream, ParallelLayout

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(400)]

JOB, BEFORE, MORE = "test", 12, 10
COMPUTE_S, START_S, PATIENCE_S = 0.1, 120.0, 15.0
HEAD_TIMEOUT_S = 5
"""Ray ends the processes of a cluster whose head was gone for so long; a minute by default."""


@contextmanager
def served(config_path: Path, *, port: int) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A cluster with a service on it, as `dataservice serve` runs it."""
    log = config_path.with_name("serve.log")
    with local_cluster(1, resource=RESOURCE, num_cpus=4) as cluster, log.open("wb") as output:
        command = [sys.executable, "-m", "dataservice.cli", "serve", str(config_path)]
        serve = subprocess.Popen(
            [*command, "--address", cluster.address, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            wait_for_workers(f"127.0.0.1:{port}")
            yield cluster, serve
        except BaseException:
            print(log.read_text()[-5000:])
            raise
        finally:
            serve.terminate()
            try:
                serve.wait(60)
            finally:
                serve.kill()
                serve.wait()


def wait_for_workers(endpoint: str) -> None:
    until = time.monotonic() + START_S
    with CoordinatorClient(endpoint) as client:
        while True:
            try:
                report: StatusReport = client.call(GetStatus(), timeout_s=5.0)
            except DataServiceError:
                assert time.monotonic() < until, f"no coordinator within {START_S:g} s"
            else:
                if json.loads(report.status).get("workers"):
                    return
                assert time.monotonic() < until, f"no worker within {START_S:g} s"
            time.sleep(0.2)


@dataclass
class LockStep:
    """Two ranks that take each step together, as training does."""

    streams: list[PackStream]
    states: list[dict[str, Any]] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)

    def steps(self, until: int) -> None:
        while not self.deliveries or self.deliveries[-1].step + 1 < until:
            batches = [next(stream) for stream in self.streams]
            self.deliveries += [delivery_of(b, rank) for rank, b in enumerate(batches)]
            self.states = [stream.state_dict() for stream in self.streams]
            time.sleep(COMPUTE_S)


@contextmanager
def two_ranks(
    endpoint: str, *, run_id: str, states: list[dict[str, Any]] | None = None
) -> Iterator[LockStep]:
    with ExitStack() as stack:
        streams = []
        for rank in range(2):
            stream = PackStream(
                endpoint,
                job=JOB,
                layout=ParallelLayout.data_parallel(rank, 2),
                micro_steps=1,
                run_id=run_id,
                timeout_s=PATIENCE_S,
                digests=True,
            )
            if states is not None:
                stream.load_state_dict(states[rank])
            streams.append(stack.enter_context(stream))
        opening = threading.Thread(target=streams[0].open)
        opening.start()
        streams[1].open()
        opening.join()
        yield LockStep(streams)


def kill_head(cluster: Any) -> list[psutil.Process]:
    """Returns what else Ray had started there, which notices late."""
    left = []
    for name, processes in cluster.head_node.all_processes.items():
        if name in ("gcs_server", "raylet"):
            for process in processes:
                left += psutil.Process(process.process.pid).children(recursive=True)
                os.kill(process.process.pid, signal.SIGKILL)
    return [process for process in left if "Agent" in process.name()]


def test_ray_head_killed_and_a_new_cluster_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_TIMEOUT_S))
    config = demo_config(tmp_path, plan={"epochs": 20}, staging={"cache_dir": None})
    config_path, port = tmp_path / "config.yaml", free_port()
    endpoint = f"127.0.0.1:{port}"
    with nothing_leaks():
        with served(config_path, port=port) as (cluster, serve):
            with two_ranks(endpoint, run_id="first") as ranks:
                ranks.steps(BEFORE)
                agents = kill_head(cluster)
                killed = time.monotonic()
                with pytest.raises(ServiceUnavailable, match="the stream's cursor is intact"):
                    ranks.steps(10**6)
                print(f"\ntrainers were told after {time.monotonic() - killed:.1f} s")
            assert serve.wait(60) != 0
            log = config_path.with_name("serve.log").read_text()
            assert "the head of the Ray cluster does not answer" in log
            print(f"serve had ended after {time.monotonic() - killed:.1f} s")
        for agent in agents:
            with suppress(psutil.NoSuchProcess):
                agent.kill()
        end = ranks.deliveries[-1].step + 1 + MORE
        lost = time.monotonic()
        with (
            served(config_path, port=port),
            two_ranks(endpoint, run_id="second", states=ranks.states) as more,
        ):
            more.steps(end)
            print(
                f"recovered in {more.deliveries[0].at - lost:.1f} s, a new cluster's start included"
            )
    clean = clean_run(config, dp_size=2, micro_steps=1, steps=end)
    prove_same(clean, [*ranks.deliveries, *more.deliveries])
