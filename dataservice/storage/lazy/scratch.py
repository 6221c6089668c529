"""A folder of a process for files that it maps, such as members of archives on other machines.

Invariants: gone when it is closed; what a killed process left is removed by the next one of the
same user on the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile

_NAME = re.compile(r"dataservice-[a-z]+-(\d+)-\w+")


class ScratchFolder:
    """`path` is a new folder below the system's place for temporary files."""

    def __init__(self, purpose: str) -> None:
        """`purpose`: one word."""
        _remove_left_behind(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=f"dataservice-{purpose}-{os.getpid()}-")

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_left_behind(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or _is_alive(int(match[1])):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
