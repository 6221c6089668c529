"""A worker's memory: freed pages go back to the kernel, and past its bound the process ends.

Invariants: only a process that is a worker and nothing else installs it; pages of files do not
count, the kernel takes those back by itself; a process past the bound says so in its log and ends
with EXIT_CODE within about a tenth of a second, whatever its other threads do, as long as they let
Python run; one that grows faster, or lets nothing run, meets the kernel's limit a little above.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import resource
import threading
import time

_LOG = logging.getLogger(__name__)

EXIT_CODE = 77
"""Of a worker that took more memory than it may."""
WATCH_S = 0.1
TRIM_S = 10.0
"""Between two times that free pages are given back. glibc keeps what lies between two blocks in
use, and with threads that allocate and free megabytes those holes add up for hours."""
SPARE_BYTES = 1 << 30
"""Of the kernel's limit above the bound, at least: it counts what is reserved, such as the stacks
of threads, and a failed allocation may end up in the wrong thread."""
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""What a worker's process starts with: two heaps for all its threads, where glibc would give each
its own, with holes of its own."""


def resident_bytes() -> int:
    """Of this process, without pages of files."""
    return _status_bytes("RssAnon", "RssShmem")


def install(memory_bytes: int | None) -> None:
    """For the rest of the process's life, without a bound for None; its thread is a daemon."""
    if memory_bytes is not None:
        _limit(memory_bytes)
    threading.Thread(target=_watch, args=(memory_bytes,), name="memory", daemon=True).start()


def _limit(memory_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    grown = max(0, memory_bytes - resident_bytes())
    soft = _status_bytes("VmData") + grown + max(SPARE_BYTES, memory_bytes // 4)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _watch(memory_bytes: int | None) -> None:
    for turn in itertools.count(1):
        if turn % round(TRIM_S / WATCH_S) == 0:
            _trim()
        if memory_bytes is not None and resident_bytes() > memory_bytes:
            _trim()
            _end_if_past(memory_bytes)
        time.sleep(WATCH_S)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _end_if_past(memory_bytes: int) -> None:
    used = resident_bytes()
    if used > memory_bytes:
        _LOG.error(
            "this worker holds %d MiB of memory, more than workers.memory_bytes of %d MiB: it "
            "ends, and another takes its place",
            used >> 20,
            memory_bytes >> 20,
        )
        logging.shutdown()
        os._exit(EXIT_CODE)


def _status_bytes(*fields: str) -> int:
    """Together."""
    with open("/proc/self/status", "rb") as file:
        lines = file.read().split(b"\n")
    names = tuple(field.encode() + b":" for field in fields)
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
