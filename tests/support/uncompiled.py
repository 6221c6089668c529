"""Code in a fresh Python process whose compiler is off, for comparing with compiled results."""

from __future__ import annotations

import os
import subprocess
import sys


def printed_by(code: str, *, disable_jit: str = "1", timeout_s: float = 100) -> str:
    """What `code` prints; a warning or an error in it fails the test that asks."""
    env = {
        **os.environ,
        "NUMBA_DISABLE_JIT": disable_jit,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
