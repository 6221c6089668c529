"""Runs a function of a test module in a process of its own, which may fork: beside the threads of
gRPC a fork can hang.

Invariants: the process, and what it started, ends with `run_alone`, by its deadline.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_alone(work: Callable[[Path], None], folder: Path, *, deadline_s: float = 110.0) -> None:
    """`work(folder)`; AssertionError with what it wrote where it failed."""
    module = ".".join(Path(work.__code__.co_filename).relative_to(TESTS).with_suffix("").parts)
    command = [sys.executable, "-m", "support.alone", module, work.__name__, str(folder)]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
        assert process.returncode == 0, output
        print(output)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(Path(sys.argv[3]))
