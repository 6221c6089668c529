"""`make demo` as a user sees it: its summary, its exit code, and nothing of it left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "deploy" / "demo.py"
MARK = "DATASERVICE_DEMO_TEST"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Short enough for the paths of Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="d"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def marked_processes(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except OSError:
            continue
    return found


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_demo_delivers_everything_once_and_leaves_nothing(short_folder: Path) -> None:
    mark = uuid.uuid4().hex
    shared_memory = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, str(DEMO)],
        env=os.environ | {"TMPDIR": str(short_folder), MARK: mark},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = dict(
        re.findall(r"^  (\S.*?)  +(\S.*)$", done.stdout.partition("summary")[2], re.MULTILINE)
    )
    assert int(figures["steps"]) > 20
    assert figures["duplicates, missing"] == "0, 0"
    assert figures["holes"] == "1"
    assert "modelled" in figures["idle share, balanced"]
    assert "measured" in figures["trainers waited"]
    deadline = time.monotonic() + 10
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert marked_processes(mark) == []
    assert list(short_folder.iterdir()) == []
    ours = [n for n in set(os.listdir("/dev/shm")) - shared_memory if "dataservice" in n]
    assert ours == []
