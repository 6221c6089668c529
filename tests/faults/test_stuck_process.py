"""A process of the service whose event loop stands still ends by itself and says where it stood."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, ctypes, sys, threading, time
from dataservice.actors.watchdog import watched

def waits_for_storage():
    time.sleep(60)

async def holds_the_loop():
    threading.Thread(target=waits_for_storage, daemon=True).start()
    await asyncio.sleep(0.3)
    {stuck}

asyncio.run(watched(holds_the_loop(), still_s=0.5))
time.sleep(1)
print("ended in order")
"""


def ended(stuck: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(stuck=stuck)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    "stuck",
    [
        "time.sleep(60)",
        "ctypes.PyDLL(None).sleep(60)",  # keeps the interpreter's lock
    ],
)
def test_a_stuck_loop_ends_its_process_with_all_stacks(stuck: str) -> None:
    done = ended(stuck)
    assert done.returncode == 1
    assert "ended in order" not in done.stdout
    assert "in holds_the_loop" in done.stderr
    assert "in waits_for_storage" in done.stderr


def test_a_loop_that_runs_is_left_alone_and_so_is_what_follows_it() -> None:
    done = ended("await asyncio.sleep(1.5)")
    assert (done.returncode, done.stdout) == (0, "ended in order\n")
    assert done.stderr == ""
