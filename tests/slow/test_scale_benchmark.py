"""benchmarks/scale.py runs, and its simulated trainers and workers get what they ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale.py"


def test_a_small_row_runs_to_its_end() -> None:
    options = ["--rows", "16x4", "--workers", "8", "--step-s", "2", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 calls refused, 0 leases lost" in done.stdout
    row = next(line for line in done.stdout.splitlines() if re.match(r"16x4 +2\.0", line))
    assert len(row.split()) == 17, row
