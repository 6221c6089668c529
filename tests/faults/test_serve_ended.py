"""`dataservice serve` killed with SIGKILL and ended with SIGTERM while ranks read: all of its
processes and files go with it, and the ranks go on with the next one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_config import demo_settings, write_config
from support.harness import RESOURCE, read_ranks
from support.health import NOT_SERVING, SERVING, watched_health
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.until import until

from dataservice.config import load_config
from dataservice.errors import DataServiceError
from dataservice.indexing import update_index
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus

STEPS = 60
CHILDREN_S = 60.0
GRACE_S = 40.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


class Serving:
    """The command as a process; its log is appended to a file."""

    def __init__(self, config_path: Path, endpoint: str, temporary: str, log: Path) -> None:
        self.endpoint = endpoint
        port = endpoint.rpartition(":")[2]
        command = [sys.executable, "-m", "dataservice.cli", "serve", str(config_path)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--port", port],
                env={**os.environ, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def is_up(self) -> bool:
        """Whether it has a worker."""
        try:
            with CoordinatorClient(self.endpoint) as client:
                status: Any = client.call(GetStatus(), timeout_s=2.0)
        except DataServiceError:
            return False
        return '"id":' in status.status

    def all_processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@contextmanager
def serving(*arguments: Any) -> Iterator[Serving]:
    """Kills what is left of it at the end."""
    service = Serving(*arguments)
    found: list[psutil.Process] = []
    try:
        until("the service is up", lambda: service.is_up() or service.process.poll(), 120.0)
        assert service.process.poll() is None
        found = service.all_processes()
        yield service
    finally:
        service.process.kill()
        for process in found:
            if process.is_running():
                process.kill()
        service.process.wait(30)


@pytest.fixture
def temporary() -> Iterator[str]:
    """With a short path, for the sockets in it."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    yield folder
    shutil.rmtree(folder)


def indexed(folder: Path) -> tuple[Path, str]:
    """Path of a config, and the endpoint to serve it at."""
    workers = {"count": 2, "max": 2, "decode_threads": 1, "resource": RESOURCE}
    path = write_config(folder, demo_settings(folder, workers=workers))
    config = load_config(str(path))
    Path(config.index_dir).mkdir()
    update_index(config)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return path, f"127.0.0.1:{probe.getsockname()[1]}"


def test_killed_then_ended_in_order(tmp_path: Path, temporary: str) -> None:
    path, endpoint = indexed(tmp_path)
    config = load_config(str(path))
    clean = clean_run(config, dp_size=2, micro_steps=2, steps=STEPS)
    started = path, endpoint, temporary, tmp_path / "serve.log"
    reading, at = threading.Event(), [0.0, 0.0]
    got: list[Any] = []

    def read() -> None:
        got.append(
            read_ranks(
                endpoint,
                job="test",
                dp_size=2,
                micro_steps=2,
                steps=STEPS,
                on_batch=lambda batch: reading.set() if batch.step == 10 else None,
                pause_s=0.02,
                timeout_s=200.0,
            )
        )

    ranks = threading.Thread(target=read)
    try:
        with nothing_leaks():
            with serving(*started) as service:
                ranks.start()
                assert reading.wait(60)
                processes = service.all_processes()
                at[0] = time.monotonic()
                service.process.kill()
                _, alive = psutil.wait_procs(processes, CHILDREN_S)
                assert not alive, [p.name() for p in alive]
                at[1] = time.monotonic()
            until("its folder is removed", lambda: not os.listdir(temporary), 10.0)
            with serving(*started) as service:
                assert len(os.listdir(temporary)) == 1
                ranks.join(200)
                processes = service.all_processes()
                with watched_health(endpoint) as health:
                    until("its health", lambda: health == [SERVING])
                    ended = time.monotonic()
                    service.process.send_signal(signal.SIGTERM)
                    assert service.process.wait(GRACE_S) == 0
                    ended = time.monotonic() - ended
                _, alive = psutil.wait_procs(processes, 5)
                assert not alive, [p.name() for p in alive]
            assert health == [SERVING, NOT_SERVING]
            assert os.listdir(temporary) == []
    except BaseException:
        print((tmp_path / "serve.log").read_text()[-6000:])
        raise
    finally:
        ranks.join(250)
    (readers,) = got
    prove_same(clean, readers.deliveries)
    print(
        f"recovered in {longest_gap(readers.deliveries):.1f} s; all processes of a killed one "
        f"ended in {at[1] - at[0]:.1f} s, of one that was asked to in {ended:.1f} s"
    )


@pytest.mark.parametrize("after_s", [3.0, 4.0, 5.0, 6.0])
def test_ended_while_it_starts(tmp_path: Path, temporary: str, after_s: float) -> None:
    path, endpoint = indexed(tmp_path)
    with nothing_leaks():
        process = Serving(path, endpoint, temporary, tmp_path / "serve.log").process
        try:
            time.sleep(after_s)
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_S)
        finally:
            process.kill()
            process.wait()
        until("its folder is removed", lambda: not os.listdir(temporary), 20.0)


def test_its_raylet_is_killed(tmp_path: Path, temporary: str) -> None:
    path, endpoint = indexed(tmp_path)
    log = tmp_path / "serve.log"
    with nothing_leaks():
        with serving(path, endpoint, temporary, log) as service:
            (raylet,) = [p for p in service.all_processes() if p.name() == "raylet"]
            killed = time.monotonic()
            raylet.kill()
            assert service.process.wait(CHILDREN_S) == 2
            print(f"serve had ended after {time.monotonic() - killed:.1f} s")
        until("its folder is removed", lambda: not os.listdir(temporary), 20.0)
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith("error: the Ray node of this machine has ended"), last
