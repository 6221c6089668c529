"""How fast a folder's disk is: written in a row, read back, and a small write made to last.

Invariants: bounded in time and bytes; what is written is forced to the disk before the time is
taken, and taken out of the page cache before it is read; nothing stays.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass

BLOCK = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    written_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float


def sequential(folder: str, *, most_bytes: int, most_s: float) -> Speed:
    """Of a file of at most `most_bytes`, written for at most `most_s` and read for as long. Raises
    OSError."""
    block = os.urandom(BLOCK)  # disks that compress or leave out zeros are not flattered
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-", buffering=0) as file:
        written, began = 0, time.perf_counter()
        while written < most_bytes and time.perf_counter() - began < most_s:
            written += os.write(file.fileno(), block[: most_bytes - written])
        os.fsync(file.fileno())
        write_s = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read, began = 0, time.perf_counter()
        while read < written and time.perf_counter() - began < most_s:
            read += len(os.pread(file.fileno(), BLOCK, read))
        read_s = time.perf_counter() - began
    return Speed(
        written_bytes=written,
        write_bytes_per_s=written / max(write_s, 1e-9),
        read_bytes_per_s=read / max(read_s, 1e-9),
    )


def sync_times(folder: str, *, count: int, most_s: float) -> list[float]:
    """Seconds that each of at most `count` writes of 512 bytes took to be on the disk; one at
    least. Raises OSError."""
    times: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        until = time.perf_counter() + most_s
        while len(times) < count and (not times or time.perf_counter() < until):
            began = time.perf_counter()
            os.write(file.fileno(), b"." * 512)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def file_system(folder: str) -> str:
    """Its type, such as ext4, from the mount that the folder is below; "" where that is not
    known."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return ""
    real = os.path.realpath(folder)
    for _, at, sort, *_ in lines:
        place = at.encode().decode("unicode_escape")
        inside = place == "/" or real == place or real.startswith(f"{place}/")
        if inside and len(place) >= len(best):
            best, kind = place, sort
    return kind
