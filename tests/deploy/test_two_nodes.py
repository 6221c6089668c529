"""deploy/two_nodes.sh for real: two nodes serve, everything listens on loopback, nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from dataservice.actors.worker_memory import ENVIRONMENT
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "two_nodes.sh"
DEMO = ROOT / "deploy" / "demo.yaml"
MARK = "TWO_NODES_TEST_RUN"
"""Every process of a run inherits this variable, with a value of its own."""

READER = """
import sys
from trainer_client import PackStream, ParallelLayout

options = {"job": "demo", "layout": ParallelLayout(), "micro_steps": 4, "timeout_s": 45}
with PackStream(sys.argv[1], **options) as stream:
    for batch in stream:
        print(batch.step, batch.micro_step, len(batch["input_ids"]))
        if batch.step == 2:
            break
"""

Found = TypeVar("Found")


class Run:
    """The script in a process of its own, and what can be seen of it from outside."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], mark: str) -> None:
        self.process = process
        self._log = folder / "log"
        self._mark = mark

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != "zombie":
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_for(self, look: Callable[[], Found | None], what: str, timeout_s: float) -> Found:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if (found := look()) is not None:
                return found
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {timeout_s} s:\n{self.log()}")

    def wait_for_line(self, pattern: str) -> str:
        def look() -> str | None:
            if (match := re.search(pattern, self.log(), re.MULTILINE)) is not None:
                return match[1]
            assert self.process.poll() is None, self.log()
            return None

        return self.wait_for(look, pattern, 120)

    def assert_nothing_left(self, files: set[Path]) -> None:
        self.wait_for(lambda: True if not self.processes() else None, "end of all processes", 20)
        assert [file for file in files if file.exists()] == []


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Run]:
    mark = uuid.uuid4().hex
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [str(SCRIPT), *arguments],
            env=os.environ | {MARK: mark, "DEMO_DIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell cannot trap a signal that was ignored when it started, as below nohup
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        run = Run(folder, process, mark)
        try:
            yield run
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            for left in run.processes():
                left.kill()


def files_of(processes: list[psutil.Process]) -> set[Path]:
    """The run's own folder below /tmp, and what it has in shared memory by name."""
    found: set[Path] = set()
    for process in processes:
        try:
            words = " ".join(process.cmdline())
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (psutil.NoSuchProcess, OSError):
            continue
        found |= {Path(name) for name in re.findall(r"/tmp/two-nodes\.\w+", words)}
        found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def outward_ports(processes: list[psutil.Process]) -> list[str]:
    """Listening sockets that are not on loopback."""
    pids = {process.pid for process in processes}
    listening = [
        connection
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids
    ]
    assert len(listening) > 5
    inward = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in listening if c.laddr.ip not in inward]


def status_of(endpoint: str) -> dict[str, Any]:
    with CoordinatorClient(endpoint) as client:
        status: dict[str, Any] = json.loads(client.call(GetStatus(), 10.0).status)
    return status


def two_workers(endpoint: str) -> set[str] | None:
    """The nodes of both workers, once they are there."""
    status = status_of(endpoint)
    if len(status["workers"]) < 2 or len(status["stagers"]) < 2:
        return None
    return {worker["node"] for worker in status["workers"]}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_nodes_serve_on_loopback_and_leave_nothing(tmp_path: Path) -> None:
    with started(tmp_path, str(DEMO)) as run:
        endpoint = run.wait_for_line(r"^serving on (\S+)")
        nodes = run.wait_for(lambda: two_workers(endpoint), "worker on each node", 60)
        assert len(nodes) == 2
        read = subprocess.run(
            [sys.executable, "-c", READER, endpoint], capture_output=True, text=True, timeout=60
        )
        assert read.returncode == 0, read.stderr + run.log()
        assert len(read.stdout.splitlines()) == 2 * 4 + 1
        processes = run.processes()
        assert outward_ports(processes) == []
        workers = [p for p in processes if any("WorkerActor" in word for word in p.cmdline())]
        assert [p.environ().items() >= ENVIRONMENT.items() for p in workers] == [True, True]
        files = files_of(processes)
        assert any(file.is_dir() for file in files)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(120) == 143
        run.assert_nothing_left(files)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_interrupted_while_the_nodes_start_it_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, str(DEMO)) as run:
        run.wait_for(
            lambda: True if any("raylet" in p.name() for p in run.processes()) else None,
            "raylet",
            60,
        )
        files = files_of(run.processes())
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(120) == 130
        run.assert_nothing_left(files)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_exit_code_of_the_service_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("job: demo\nzzz: []\n")
    with started(tmp_path, str(tmp_path / "wrong.yaml")) as run:
        assert run.process.wait(200) == 2
        assert "zzz: unknown key" in run.log()
        run.assert_nothing_left(set())


def test_without_a_config_it_says_how_it_is_called() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "usage: deploy/two_nodes.sh CONFIG" in done.stderr
