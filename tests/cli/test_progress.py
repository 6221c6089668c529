"""The bar of long work: what it says, on a terminal alone, and that a lint reaches its end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.demo_config import DATA, demo_settings, write_config

from dataservice.cli.progress import counted_text, progress
from dataservice.linting.reach import Reach
from dataservice.linting.run import Options, lint_files


def test_what_is_counted_is_said_with_its_rate() -> None:
    assert counted_text(12, 40, 3.14, "packs") == "12 of 40 packs, 3.1 a second"
    assert counted_text(1200, None, 3, "steps") == "1,200 steps, 3.0 a second"
    assert counted_text(5e6, 2e9, 1e6, "bytes") == "5.0 MB of 2.0 GB, 1.0 MB/s"


def test_nothing_is_shown_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("work", "packs") as show:
        show(1, 2, "said")
    assert capfd.readouterr() == ("", "")


def on_a_terminal(*arguments: object) -> str:
    """What a command shows on a terminal of 160 columns that is its stderr alone."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "dataservice.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
    ) as command:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # the end of a terminal
            pass
        os.close(ours)
        assert command.wait(timeout=60) in (0, 1)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())


def test_long_work_shows_rate_and_time_left(tmp_path: Path) -> None:
    settings = demo_settings(tmp_path, staging={"cache_dir": None})
    path = write_config(tmp_path, settings)
    shown = on_a_terminal("index", path)
    assert re.search(r"index .* of \S+ MB, \S+ \S*B/s .*samples/s", shown)
    shown = on_a_terminal("lint", DATA)
    assert re.search(r"lint .* of 2\.\d MB, .* looked at, \d+ rejected", shown)
    out = tmp_path / "out"
    shown = on_a_terminal("preview", path, "--dp-size", 1, "--packs", 3, "--out", out)
    assert re.search(r"preview .*[123] of 3 packs, \d+\.\d a second .*\d:\d\d:\d\d", shown)
    shown = on_a_terminal(
        "simulate", "--synthetic", "text80", "--dp-size", 2, "--micro-steps", 1,
        "--html", tmp_path / "page.html",
    )  # fmt: skip
    assert re.search(r"simulate .* packings, .* packing [\d,]+ tokens a pack", shown)


def test_a_lint_reaches_all_that_it_expects(tmp_path: Path) -> None:
    (tmp_path / "broken.zip").write_bytes(b"PK" + b"\0" * 100)
    for files in ([str(DATA)], [str(DATA / "caption" / "caption-00000.zip"), str(tmp_path)]):
        reach, seen = Reach(), [0]
        for _ in lint_files(files, [], Options(), reach):
            seen.append(reach.done_bytes)
        assert seen == sorted(seen) and len(set(seen)) > 3
        assert reach.done_bytes == reach.total_bytes > 0
