"""The bound on a worker's memory: watched, and enforced by ending the process.

Invariants: only a process that is a worker and nothing else installs it; pages of files do not
count, the kernel takes those back by itself; a process past the bound says so in its log and ends
with EXIT_CODE within about a tenth of a second, whatever its other threads do, as long as they let
Python run; one that grows faster, or lets nothing run, meets the kernel's limit a little above.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time

_LOG = logging.getLogger(__name__)

EXIT_CODE = 77
"""Of a worker that took more memory than it may."""
WATCH_S = 0.1
SPARE_BYTES = 1 << 30
"""Of the kernel's limit above the bound, at least: it counts what is reserved, such as the stacks
of threads, and a failed allocation may end up in the wrong thread."""
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""What a worker's process starts with: glibc gives each thread a heap of its own, which fills up
with holes where threads allocate and free megabytes; with a heap for every one of its threads a
worker grows for hours (5.6 MB a 1,000 packs, benchmarks/soak_pictures.py), with two it does not."""


def resident_bytes() -> int:
    """Of this process, without pages of files."""
    return _status_bytes("RssAnon", "RssShmem")


def install(memory_bytes: int) -> None:
    """Bounds this process for the rest of its life; the thread that watches is a daemon."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    grown = max(0, memory_bytes - resident_bytes())
    soft = _status_bytes("VmData") + grown + max(SPARE_BYTES, memory_bytes // 4)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    threading.Thread(target=_watch, args=(memory_bytes,), name="memory", daemon=True).start()


def _watch(memory_bytes: int) -> None:
    while True:
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
        time.sleep(WATCH_S)


def _status_bytes(*fields: str) -> int:
    """Together."""
    with open("/proc/self/status", "rb") as file:
        lines = file.read().split(b"\n")
    names = tuple(field.encode() + b":" for field in fields)
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
