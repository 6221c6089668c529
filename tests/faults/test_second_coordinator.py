"""A second coordinator of a job: refused while the first one lives, wherever it is started; takes
over from one that was silent, which then hands out nothing more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.demo_config import demo_config
from support.harness import Delivery, delivery_of
from support.proof import clean_run, nothing_leaks, prove_same
from support.service_processes import ServiceProcesses, free_port
from support.until import until
from support.worker_process import WorkerProcesses

from dataservice.actors.state_log import open_state
from dataservice.config import Config, config_to_json
from dataservice.errors import DataServiceError, JobHeld, ServiceUnavailable
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus, OpenSession
from trainer_client import PackStream, ParallelLayout

ELSEWHERE = Path(__file__).parents[1] / "support" / "coordinator_elsewhere.py"
STEPS, MORE = 20, 10


@contextmanager
def elsewhere(config: Config, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    path, log = folder / "elsewhere.json", folder / "elsewhere.log"
    path.write_text(config_to_json(config))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(ELSEWHERE), str(path), str(port)],
            stdin=subprocess.PIPE,
            stderr=output,
        )
    try:
        yield process
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def wait_for(endpoint: str, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    with CoordinatorClient(endpoint) as client:
        while True:
            try:
                client.call(GetStatus(), timeout_s=5.0)
                return
            except DataServiceError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


def stream_of(config: Config, endpoint: str, run_id: str) -> PackStream:
    return PackStream(
        endpoint,
        job=config.job,
        layout=ParallelLayout.data_parallel(0, 1),
        micro_steps=1,
        run_id=run_id,
        timeout_s=8.0,
        prefetch_packs=1,
        digests=True,
    )


def opening(config: Config) -> OpenSession:
    return OpenSession(
        job=config.job,
        run_id="late",
        dp_rank=0,
        dp_size=1,
        micro_steps=1,
        packs_per_cell=1,
        state=None,
        host="h",
        wait_s=1.0,
    )


def test_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    config = demo_config(tmp_path, staging={"cache_dir": None})
    with (
        nothing_leaks(),
        ServiceProcesses(config, tmp_path / "service", workers=0, keep=False) as service,
    ):
        pid = service.pids["coordinator"]
        with pytest.raises(JobHeld, match=rf"held by the coordinator of job test .* {pid} on "):
            open_state(config)
        with elsewhere(config, tmp_path, free_port()) as second:
            assert second.wait(60) == 1
        assert f"process {pid} on" in (tmp_path / "elsewhere.log").read_text()
        until("the first one is open", lambda: service.status().get("epoch") == 1, 20.0)


@pytest.mark.slow
def test_a_silent_one_is_superseded_and_hands_out_nothing_more(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path, plan={"epochs": 20}, staging={"cache_dir": None}, serving={"plan_ahead_steps": 4}
    )
    deliveries: list[Delivery] = []
    port = free_port()
    with nothing_leaks():
        with (
            ServiceProcesses(config, tmp_path / "service", workers=1, keep=False) as service,
            stream_of(config, service.endpoint, "first") as stream,
        ):
            for _ in range(STEPS):
                deliveries.append(delivery_of(next(stream), 0))
            service.signal("coordinator", signal.SIGSTOP)
            began = time.monotonic()
            with elsewhere(config, tmp_path, port):
                wait_for(f"127.0.0.1:{port}")
                print(f"\ntaken over after {time.monotonic() - began:.1f} s")
                service.signal("coordinator", signal.SIGCONT)
                with (
                    pytest.raises(ServiceUnavailable, match=r"no longer owns.*epoch 2"),
                    CoordinatorClient(service.endpoint) as client,
                ):
                    client.call(opening(config), timeout_s=10.0)
                with pytest.raises(ServiceUnavailable, match="hands out nothing more"):
                    while True:
                        deliveries.append(delivery_of(next(stream), 0))
                state = stream.state_dict()
                with (
                    WorkerProcesses(
                        f"127.0.0.1:{port}",
                        count=1,
                        memory_bytes=None,
                        codecs=(),
                        folder=tmp_path,
                    ),
                    stream_of(config, f"127.0.0.1:{port}", "second") as more,
                ):
                    more.load_state_dict(state)
                    for _ in range(MORE):
                        deliveries.append(delivery_of(next(more), 0))
                    print(f"recovered in {deliveries[-MORE].at - began:.1f} s")
    clean = clean_run(config, dp_size=1, micro_steps=1, steps=len(deliveries))
    prove_same(clean, deliveries)
