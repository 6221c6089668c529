"""rpc.allocator: what is received is not put into fresh pages each time."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from dataservice.rpc.allocator import keep_freed_blocks

if sys.argv[1] == "kept":
    keep_freed_blocks()

def round():
    messages = [b"x" * (4 << 20) for _ in range(4)]

for _ in range(5):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages filled anew for 320 MiB of messages."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=60, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's thresholds")
def test_freed_messages_are_used_again() -> None:
    assert faults("as it comes") > 40_000
    assert faults("kept") < 4_000
