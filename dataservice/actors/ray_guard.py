"""Ends what a killed process leaves of its Ray: processes that keep files open in its folder, and
the folder.

Invariants: it is a process of its own, outside the session of the one it guards, and waits for the
end of its input, which comes when that one ends, however it does; it ends processes only while the
folder is there, that is, where it was not removed in order, and none but Python's and Ray's;
standard library alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GRACE_S = 5.0
"""That Ray's processes have to notice by themselves; two of them take more than a minute."""
KILLS_S = 10.0
"""For which those that are still starting others are looked for again."""
QUIET_S = 2.0
"""For which the folder is to stay away: a process that was just starting makes it anew."""
POLL_S = 0.2
JOIN_S = 10.0


@contextmanager
def guarded(folder: str) -> Iterator[None]:
    """Until the block ends; removes the folder then."""
    guard = subprocess.Popen(
        [sys.executable, __file__, folder], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            guard.wait(JOIN_S)
        guard.kill()
        guard.wait()


def processes_of(folder: str) -> list[int]:
    """Ids of this user's processes of Python and Ray that have a file open below it."""
    found = []
    python = os.path.realpath(sys.executable)
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError):  # ended meanwhile, or another user's
                program = os.readlink(f"/proc/{name}/exe")
                descriptors = os.listdir(f"/proc/{name}/fd")
                ours = program == python or "/ray/" in program
                if ours and any(_is_below(f"/proc/{name}/fd/{fd}", folder) for fd in descriptors):
                    found.append(int(name))
    return found


def _is_below(link: str, folder: str) -> bool:
    try:
        return os.readlink(link).startswith(f"{folder}/")
    except OSError:
        return False


def main(folder: str) -> None:
    sys.stdin.buffer.read()
    if not os.path.isdir(folder):
        return
    until = time.monotonic() + GRACE_S
    while processes_of(folder) and time.monotonic() < until:
        time.sleep(POLL_S)
    there = time.monotonic()
    until = there + KILLS_S
    while time.monotonic() < min(until, there + QUIET_S):
        if os.path.isdir(folder):
            there = time.monotonic()
            left = processes_of(folder)
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                shutil.rmtree(folder, ignore_errors=True)
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
