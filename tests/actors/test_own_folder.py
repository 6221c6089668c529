"""Temporary folders of processes that end in order, or are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.until import until

from dataservice.actors.own_folder import own_folder

HOLD = """
import sys
from dataservice.actors.own_folder import own_folder
with own_folder("own-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
GUARDED = """
import os, subprocess, sys, tempfile
from dataservice.actors.ray_guard import guarded
folder = tempfile.mkdtemp(prefix="own-")
with guarded(folder):
    log = open(f"{folder}/log", "w")
    child = [sys.executable, "-c", "import time; time.sleep(1000)"]
    print(subprocess.Popen(child, stdout=log, stderr=log, start_new_session=True).pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def running(script: str) -> tuple[subprocess.Popen[str], str]:
    """The process and the line it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_killed_process_leaves_it_to_the_next_and_a_live_one_keeps_it(temporary: Path) -> None:
    foreign = temporary / "own-foreign"
    foreign.mkdir()
    process, folder = running(HOLD)
    try:
        with own_folder("own-"):
            assert Path(folder).is_dir()
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert Path(folder).is_dir()
    with own_folder("own-") as other:
        assert not Path(folder).exists() and Path(other).is_dir()
    assert list(temporary.iterdir()) == [foreign]


def test_a_guard_ends_what_a_killed_process_leaves(temporary: Path) -> None:
    process, child = running(GUARDED)
    try:
        assert Path(f"/proc/{child}").exists()
    finally:
        process.kill()
        process.communicate(timeout=10)
    until("the child ends", lambda: not is_running(int(child)), 30.0)
    until("the folder is removed", lambda: not list(temporary.iterdir()), 10.0)


def test_a_guard_of_a_process_that_ends_in_order_ends_nothing(temporary: Path) -> None:
    process, child = running(GUARDED)
    try:
        process.communicate("", timeout=30)
        assert process.returncode == 0
        assert Path(f"/proc/{child}").exists()
        assert not list(temporary.iterdir())
    finally:
        process.kill()
        subprocess.run(["kill", "-9", child], check=False)


LATE = """
import os, subprocess, sys, tempfile
from dataservice.actors.ray_guard import guarded
folder = tempfile.mkdtemp(prefix="own-")
again = '''
import os, sys, time
while os.path.isdir(sys.argv[1]):
    time.sleep(0.01)
time.sleep(0.5)
os.makedirs(sys.argv[1] + "/session")
open(sys.argv[1] + "-again", "w").close()
'''
with guarded(folder):
    subprocess.Popen([sys.executable, "-c", again, folder], start_new_session=True)
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_a_process_makes_anew_is_removed_too(temporary: Path) -> None:
    process, folder = running(LATE)
    process.kill()
    process.communicate()
    until("it is made anew", lambda: Path(f"{folder}-again").exists(), 10.0)
    until("it is removed again", lambda: not Path(folder).exists(), 10.0)
