"""deploy/docker/serve_on_ray.sh: joins Ray, serves, and ends both in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "docker" / "serve_on_ray.sh"

PLAY = """#!/usr/bin/env python3
# Stands for NAME: says what it was called with, and what happens to it.
import os, signal, sys, time
said = open(os.environ["SAID"], "a", buffering=1)
name = os.path.basename(sys.argv[0])
parent = os.getppid()
print(name, *sys.argv[1:], file=said)
def stop(*_):
    print(name, "TERM", file=said)
    time.sleep(0.3)
    print(name, "ended", file=said)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if name == "ray":
    if os.environ.get("NODE") == "refused":
        sys.exit("no head there")
    print("Ray runtime started.", flush=True)
elif "SERVICE" in os.environ:
    time.sleep(0.2)
    sys.exit(int(os.environ["SERVICE"]))
while os.getppid() == parent:
    time.sleep(0.05)
"""


class Container:
    """The script with players in place of `ray` and `dataservice`."""

    def __init__(self, process: subprocess.Popen[str], said: Path) -> None:
        self.process = process
        self._said = said

    def said(self) -> list[str]:
        return self._said.read_text().splitlines() if self._said.exists() else []

    def wait_for(self, line: str) -> None:
        until = time.monotonic() + 20
        while line not in self.said():
            assert time.monotonic() < until, (line, self.said())
            time.sleep(0.02)


@contextmanager
def container(folder: Path, **environment: str) -> Iterator[Container]:
    for name in ("ray", "dataservice"):
        player = folder / name
        player.write_text(PLAY)
        player.chmod(0o755)
    said = folder / "said"
    env = {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SAID": str(said),
        "TMPDIR": str(folder),
        "RAY_ADDRESS": "head:6379",
        "KUBERAY_GEN_RAY_START_CMD": "ray start  --address=head:6379  --block ",
    }
    with subprocess.Popen(
        [str(SCRIPT), "run.yaml", "--workers", "2"],
        env=env | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield Container(process, said)
        finally:
            process.kill()


JOINED = "ray start --address=head:6379 --block"
SERVED = "dataservice serve run.yaml --workers 2 --address head:6379"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_service_ends_before_its_node(tmp_path: Path, number: int, code: int) -> None:
    with container(tmp_path) as started:
        started.wait_for(SERVED)
        started.process.send_signal(number)
        assert started.process.wait(20) == code
        assert started.said() == [
            JOINED,
            SERVED,
            "dataservice TERM",
            "dataservice ended",
            "ray TERM",
            "ray ended",
        ]
    assert {path.name for path in tmp_path.iterdir()} == {"ray", "dataservice", "said"}


@pytest.mark.parametrize("code", [0, 2, 70])
def test_the_exit_code_is_the_services(tmp_path: Path, code: int) -> None:
    with container(tmp_path, SERVICE=str(code)) as started:
        assert started.process.wait(20) == code
        assert started.said() == [JOINED, SERVED, "ray TERM", "ray ended"]


def test_a_node_that_cannot_join_ends_the_container(tmp_path: Path) -> None:
    with container(tmp_path, NODE="refused") as started:
        assert started.process.wait(20) == 1
        output = started.process.stdout.read() if started.process.stdout else ""
        assert "no head there" in output
        assert "ray start has ended" in output
        assert started.said() == [JOINED]


def test_it_says_what_is_missing() -> None:
    for arguments, words in (
        ((), "usage: serve-on-ray CONFIG"),
        (("run.yaml",), "KUBERAY_GEN_RAY_START_CMD is not set"),
    ):
        env = {"PATH": os.environ["PATH"]}
        done = subprocess.run(
            [str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 2
        assert words in done.stderr
