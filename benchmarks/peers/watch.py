"""The processes of a run: their memory, their CPU time, and their end.

Invariants: a process belongs to the run if the run's own process is among its ancestors, or was
when it was first seen; memory is PSS, so that a page that several share counts once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


class Tree:
    def __init__(self, root: int) -> None:
        self._known = {root: _started(root)}
        self._cpu: dict[int, float] = {}
        self.peak_bytes = 0

    def pids(self) -> list[int]:
        parents = dict(_parents())
        self._known = {p: t for p, t in self._known.items() if p in parents and _started(p) == t}
        grew = True
        while grew:
            new = [p for p, parent in parents.items() if parent in self._known]
            new = [p for p in new if p not in self._known]
            self._known |= {p: _started(p) for p in new}
            grew = bool(new)
        return list(self._known)

    def look(self) -> None:
        """Takes the memory as it is now into `peak_bytes`."""
        self.peak_bytes = max(self.peak_bytes, sum(map(_pss, self.pids())))

    def cpu_seconds(self) -> float:
        """Since their start, of those alive now and of those seen before."""
        for pid in self.pids():
            self._cpu[pid] = max(self._cpu.get(pid, 0.0), _cpu(pid))
        return sum(self._cpu.values())

    def kill(self) -> int:
        """How many were still there."""
        left = self.pids()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            if fields[0] != "Z":
                yield int(entry.name), int(fields[1])


def _stat(pid: int) -> list[str]:
    """The fields behind the name; none where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _cpu(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
