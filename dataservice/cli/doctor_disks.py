"""The disks of a service: of its cache, which should be fast, and of its state, which should be
safe and quick to sync.

Invariants: a few hundred megabytes and a few seconds at most; nothing stays but empty folders that
the service would make itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile

from rich.filesize import decimal

from dataservice.cli import disk_speed
from dataservice.cli.doctor_finding import Finding, ok, problem, warning

MOST_BYTES = 256 << 20
MOST_S = 2.0
SPARE = 4
"""The test leaves this many times what it writes."""
SLOW_BYTES_PER_S = 200e6
"""Below that a cache is hardly faster than what it copies from."""
SLOW_SYNC_S = 0.050
"""Each step's placement is synced before the step is handed out."""
IN_MEMORY = ("tmpfs", "ramfs")
OVER_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "ceph",
    "gpfs",
    "9p",
    "beegfs",
    "fuse.s3fs",
)


def cache_disk(folder: str, *, budget_bytes: int | None, field: str) -> Finding:
    """`field` names the folder's setting."""
    name = "cache disk"
    try:
        os.makedirs(folder, exist_ok=True)
        free = shutil.disk_usage(folder).free
        most = min(MOST_BYTES, free // SPARE)
        speed = disk_speed.sequential(folder, most_bytes=most, most_s=MOST_S)
    except OSError as error:
        remedy = f"name a folder on this machine's own disk in {field}"
        return problem(name, f"{folder} cannot be written to ({error.strerror})", remedy)
    if not speed.written_bytes:
        return warning(
            name,
            f"{folder} is full ({decimal(free)} free): its speed was not measured",
            f"make room, or name another disk in {field}: shards that do not fit are read from "
            "their origins (what the cache holds already counts as used here)",
        )
    kind = disk_speed.file_system(folder)
    words = (
        f"{folder} ({kind or 'unknown'}): writes {decimal(round(speed.write_bytes_per_s))}/s, "
        f"reads {decimal(round(speed.read_bytes_per_s))}/s, {decimal(free)} free"
    )
    if kind in IN_MEMORY:
        return warning(name, f"{words}; it is memory", f"name an NVMe disk in {field}")
    if kind in OVER_NETWORK:
        remedy = f"name this machine's own disk in {field}: the point of a copy is to be near"
        return warning(name, f"{words}; it is on the network", remedy)
    if budget_bytes is not None and budget_bytes > free:
        return warning(
            name,
            f"{words}; staging.budget_bytes is {decimal(budget_bytes)}",
            "lower staging.budget_bytes or make room: shards that do not fit are read from their "
            "origins (what the cache holds already counts as used here)",
        )
    if speed.write_bytes_per_s < SLOW_BYTES_PER_S:
        return warning(
            name, f"{words}; that is slow", f"name an NVMe disk in {field}, or stage nothing"
        )
    return ok(name, words)


def state_disk(folder: str, *, field: str) -> Finding:
    name = "state disk"
    try:
        os.makedirs(folder, exist_ok=True)
        times = disk_speed.sync_times(folder, count=50, most_s=MOST_S)
        locks = _can_lock(folder)
    except OSError as error:
        remedy = f"name a folder that outlives this machine's restart in {field}"
        return problem(name, f"{folder} cannot be written to ({error.strerror})", remedy)
    kind = disk_speed.file_system(folder)
    middle = disk_speed.median(times)
    words = (
        f"{folder} ({kind or 'unknown'}): a write lasts after {middle * 1e3:.1f} ms, at most "
        f"{max(times) * 1e3:.1f} ms"
    )
    if kind in IN_MEMORY:
        return warning(
            name,
            f"{words}; it is memory, so a restart of the machine ends the run's journal",
            f"name a folder on a disk in {field}",
        )
    if not locks:
        return warning(
            name,
            f"{words}; the file system has no locks",
            "two coordinators of one job are told apart by their signs of life alone, which takes "
            f"seconds at a start: prefer a file system with locks for {field}",
        )
    if middle > SLOW_SYNC_S:
        return warning(name, f"{words}; each step waits for that", f"name a faster disk in {field}")
    return ok(name, words)


def _can_lock(folder: str) -> bool:
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
