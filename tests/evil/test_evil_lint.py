"""`dataservice lint --json --digest` on every file of a folder of hostile files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evil.expectations import (
    check_archive,
    check_line,
    check_picture,
    entries,
    needs_files,
    path_of,
)

pytestmark = needs_files

RUNNER = str(Path(__file__).with_name("watched_lint.py"))
LIMIT_S = 10.0
"""A file may take."""
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
COMPILED = "/dataservice-numba-"
"""The folder of the project's own compiled code."""
_NO_FILES: list[dict[str, Any]] = [{"file": "none"}]


def name_of(entry: dict[str, Any]) -> str:
    return str(entry["file"])


def watched(*files: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, RUNNER, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S * (2 + len(files)),
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """By file, all in one process, one after the other."""
    paths = [path_of(entry) for entry in entries()]
    before = {path: path.stat().st_mtime_ns for path in [*paths, *(p.parent for p in paths)]}
    told = {row["file"]: row for row in watched(*paths)[:-1]}
    assert before == {path: path.stat().st_mtime_ns for path in before}
    return told


@pytest.mark.parametrize("entry", entries() or _NO_FILES, ids=name_of)
def test_as_the_manifest_asks(entry: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    path, expect = path_of(entry), entry["expect"]
    told = found[str(path)]
    rows = told["rows"]
    assert all(row["file"] == str(path) for row in rows)
    assert told["rc"] == int(any(row["outcome"] == "rejected" for row in rows))
    assert told["seconds"] < LIMIT_S
    if entry["file"].startswith("images/"):
        (row,) = rows
        check_picture(row, expect)
    elif path.suffix == ".zip":
        check_archive(rows, expect)
    else:
        assert [row["line"] for row in rows] == [line["line"] for line in expect["lines"]]
        for row, line in zip(rows, expect["lines"], strict=True):
            check_line(row["outcome"], row["reason"], line)


@pytest.mark.parametrize("entry", entries() or _NO_FILES, ids=name_of)
def test_nothing_else_is_touched(entry: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    path = path_of(entry)
    told = found[str(path)]
    allowed = {str(path.resolve())}
    if path.suffix == ".jsonl":
        allowed |= {str(beside.resolve()) for beside in path.parent.glob("*.zip")}
    assert set(told["opened"]) <= allowed
    assert [what for what in told["wrote"] if COMPILED not in what] == []
    assert not told["net"]


@pytest.mark.parametrize(
    "entry",
    [e for e in entries() if "max_memory_mb" in e["expect"]] or _NO_FILES,
    ids=name_of,
)
def test_memory_of_the_whole_process(entry: dict[str, Any]) -> None:
    """Python and its libraries included."""
    told = watched(path_of(entry))[-1]
    assert told["peak_mb"] <= entry["expect"]["max_memory_mb"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here")
def test_system_calls(tmp_path: Path) -> None:
    """What an audit hook cannot see: files and sockets opened by libraries."""
    log = tmp_path / "calls"
    folder = path_of({"file": ""})
    command = [sys.executable, "-m", "dataservice.cli", "lint", "--json", "--digest", str(folder)]
    calls = (
        "trace=open,openat,creat,socket,connect,mkdir,unlink,rename,renameat2,link,symlink,execve"
    )
    done = subprocess.run(
        ["strace", "-f", "-qq", "-e", calls, "-o", str(log), *command],
        capture_output=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    if b"PTRACE" in done.stderr or not log.exists():
        pytest.skip("strace may not trace here")
    assert done.returncode == 1, done.stderr
    bad = []
    for line in log.read_text(errors="replace").splitlines():
        call = line.split(maxsplit=1)[1]
        changes = call.startswith(("creat(", "socket(", "connect(", "mkdir(", "unlink(", "rename"))
        opens = call.startswith(("open(", "openat(")) and ("O_WRONLY" in call or "O_RDWR" in call)
        if COMPILED not in call and (changes or (opens and "/dev/null" not in call)):
            bad.append(call)
        if "/etc/passwd" in call or "/etc/hostname" in call:
            bad.append(call)
    assert not bad
