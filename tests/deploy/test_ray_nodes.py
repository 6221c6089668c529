"""deploy/vm/ray_node.sh for real: two machines serve, a third reads, nothing stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.machines import Machines, lacks
from tests.support.slurm import processes_with
from tests.support.until import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "vm" / "ray_node.sh"
DEMO = ROOT / "deploy" / "demo.yaml"
OWN_MACHINE = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_TOKEN", "RAY_TMPDIR")
"""What tests with a Ray of this machine alone leave in the environment."""
READER = """
import socket, sys
from trainer_client import PackStream, ParallelLayout

options = {"job": "demo", "layout": ParallelLayout(), "micro_steps": 4, "timeout_s": 45}
with PackStream(sys.argv[1], **options) as stream:
    for batch in stream:
        print(socket.gethostname(), batch.step, batch.micro_step)
        if batch.step == 2:
            break
"""

pytestmark = pytest.mark.skipif(bool(lacks()), reason=lacks())


def environment(folder: Path) -> dict[str, str]:
    token = folder / "ray.token"
    token.write_text("b" * 64)
    here = {k: v for k, v in os.environ.items() if k not in OWN_MACHINE}
    return here | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DEMO_DIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_NODE_CPUS": "2",
        "RAY_NODE_FILE": str(folder / "cluster"),
    }


@contextmanager
def node(
    machines: Machines, name: str, role: str, folder: Path, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = machines.start(name, [str(SCRIPT), role], log=log, env=env)
    yield process


def script_of(folder: Path, role: str) -> int:
    (pid,) = processes_with(str(folder), command=rf"^bash {SCRIPT} {role}")
    return pid


@pytest.mark.clusters
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_machines_serve_a_third_and_leave_nothing(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with Machines("one", "two", "gpu") as machines, ExitStack() as stack:
        head = stack.enter_context(node(machines, "one", "head", tmp_path, env))
        until("a cluster", (tmp_path / "cluster").exists, 90)
        address = (tmp_path / "cluster").read_text().strip()
        assert address == f"{machines.address['one']}:6379"
        other = stack.enter_context(node(machines, "two", address, tmp_path, env))
        until("the second machine up", lambda: "up, in" in (tmp_path / "two.log").read_text(), 90)

        serve = [sys.executable, "-m", "dataservice.cli", "serve", str(DEMO)]
        options = ["--address", address, "--host", "0.0.0.0", "--insecure", "--port", "7070"]
        with (tmp_path / "serve.log").open("wb") as log:
            service = machines.start("one", [*serve, *options], log=log, env=env)
        endpoint = f"{machines.address['one']}:7070"
        until(
            "the service",
            lambda: f"serving on {endpoint}" in (tmp_path / "serve.log").read_text(),
            120,
        )
        read = machines.run(
            "gpu",
            [sys.executable, "-c", READER, endpoint],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert read.returncode == 0, read.stderr + (tmp_path / "serve.log").read_text()
        assert len(read.stdout.splitlines()) == 2 * 4 + 1
        assert set(re.findall(r"^\w+", read.stdout, re.MULTILINE)) == {"gpu"}

        (serving,) = processes_with(str(tmp_path), command=r"^\S*python -m dataservice.cli serve")
        os.kill(serving, signal.SIGTERM)
        assert service.wait(60) == 0
        os.kill(script_of(tmp_path, address), signal.SIGTERM)
        assert other.wait(60) == 143
        os.kill(script_of(tmp_path, "head"), signal.SIGTERM)
        assert head.wait(60) == 143
        until("every process gone", lambda: not processes_with(str(tmp_path)), 20)
        assert not list(Path("/tmp").glob("ray-node.*"))


def test_what_cannot_work_is_refused_in_words(tmp_path: Path) -> None:
    env = environment(tmp_path)
    before = set(Path("/tmp").glob("ray-node.*"))

    def refused(*arguments: str, **more: str) -> str:
        result = subprocess.run(
            [str(SCRIPT), *arguments], env=env | more, capture_output=True, text=True, timeout=20
        )
        assert result.returncode == 2
        return result.stderr

    assert "usage: deploy/vm/ray_node.sh head|HOST:PORT" in refused()
    assert "openssl rand -hex 32" in refused("head", RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    assert "there is no such interface" in refused("head", RAY_NODE_INTERFACE="none0")
    assert set(Path("/tmp").glob("ray-node.*")) <= before
