"""The machine: cores, memory, shared memory, open files, clock and the host's name.

Invariants: what is read and what is thought of it are apart; nothing is changed, and nothing takes
longer than a second.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import socket
import threading
import time
from pathlib import Path

from rich.filesize import decimal

from dataservice.cli.doctor_finding import Finding, ok, problem, warning
from dataservice.config import Config
from dataservice.core.fleet import workers_of_node

CGROUP = Path("/sys/fs/cgroup")
LEAST_FILES = 8192
"""Open files: connections of some thousand ranks, and shards."""
LEAST_SHM_BYTES = 256 << 20
"""Ray's object store, of which the service needs next to nothing, moves to the disk below that."""
SLOW_CLOCK_S = 2e-6
SLOW_NAME_S = 1.0
_TIME_ERROR = 5
"""What adjtimex answers while nobody keeps the clock."""


def machine_findings(config: Config | None) -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    return [
        system(platform.system(), platform.machine()),
        cores_of(cores, quota(), config),
        memory(memory_bytes(), cores, config),
        shared_memory("/dev/shm"),  # noqa: S108
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        clock(_is_kept(), _clock_cost_s(), time.time()),
        host_name(socket.gethostname()),
    ]


def system(name: str, kind: str) -> Finding:
    if name != "Linux":
        return problem("system", f"{name} on {kind}", "the service runs on Linux only")
    return ok("system", f"Linux {platform.release()} on {kind}")


# ---- cores and memory ----------------------------------------------------------------------------


def quota() -> float | None:
    """CPUs that the container may use at a time; None without a limit."""
    try:
        most, period = (CGROUP / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def cores_of(cores: int, most: float | None, config: Config | None) -> Finding:
    """`cores` that this process may run on, `most` that it gets of them at a time."""
    if most is not None and most < cores - 0.5:
        return warning(
            "cores",
            f"{cores} are seen, but the container gets {most:g} at a time",
            "whole cores decode best: give the container as many as it sees (on Kubernetes whole "
            "CPUs, requests like limits), or set workers.count and workers.decode_threads by hand",
        )
    takes = workers_of_node(cores)
    count = None if config is None else config.workers.count
    if count is not None and count > 2 * takes:
        return warning(
            "cores",
            f"{cores}; workers that they take: {takes}, workers.count is {count}",
            "more workers than cores only cost memory on one machine: lower workers.count, or join "
            "other machines",
        )
    return ok("cores", f"{cores}; workers that they take: {takes}")


def memory_bytes() -> int:
    """That may be had: of the machine, or of the container where that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        return min(available, limit - used)
    except (OSError, ValueError):
        return available


def memory(available: int, cores: int, config: Config | None) -> Finding:
    if config is None:
        return ok("memory", f"{decimal(available)} may be had")
    workers = min(config.workers.count or workers_of_node(cores), workers_of_node(cores))
    needed = workers * config.workers.ready_bytes
    words = f"{decimal(available)} may be had, {decimal(needed)} of it for built packs"
    if needed > available:
        remedy = "lower workers.ready_bytes or the number of workers"
        return warning("memory", f"{words} (workers.ready_bytes of {workers} workers)", remedy)
    return ok("memory", words)


def shared_memory(folder: str) -> Finding:
    name = "shared memory"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        remedy = f"mount a tmpfs at {folder}: Ray's object store is there"
        return problem(name, f"{folder}: {error.strerror}", remedy)
    words = f"{folder}: {decimal(usage.free)} free of {decimal(usage.total)}"
    if usage.free < LEAST_SHM_BYTES:
        return warning(
            name,
            words,
            f"Ray's object store would move to the disk: give the container at least "
            f"{decimal(LEAST_SHM_BYTES)} (docker run --shm-size, on Kubernetes an emptyDir of "
            f"medium Memory at {folder})",
        )
    return ok(name, words)


def open_files(soft: int, hard: int) -> Finding:
    if 0 <= soft < LEAST_FILES:
        most = hard if 0 <= hard < LEAST_FILES else LEAST_FILES
        remedy = f"`ulimit -n {most}` before the service is started (LimitNOFILE of a unit)"
        return warning("open files", f"at most {soft:,}; ranks and shards take one each", remedy)
    return ok("open files", "no limit" if soft < 0 else f"at most {soft:,}")


# ---- clock and name ------------------------------------------------------------------------------


def _is_kept() -> bool | None:
    """Whether the kernel's clock is kept by somebody, such as chrony; None where it does not
    say."""
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


def _clock_cost_s() -> float:
    count = 1000
    began = time.perf_counter()
    for _ in range(count):
        time.monotonic()
    return (time.perf_counter() - began) / count


def clock(is_kept: bool | None, cost_s: float, now_s: float) -> Finding:
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < os.stat(__file__).st_mtime - 86400:
        return problem(
            "clock",
            f"{shown} lies before this file was written",
            "set the clock: certificates fail",
        )
    if cost_s > SLOW_CLOCK_S:
        return warning(
            "clock",
            f"{shown}; asking it takes {cost_s * 1e6:.1f} us",
            "/sys/devices/system/clocksource/clocksource0/current_clocksource should be tsc or a "
            "paravirtual one",
        )
    if is_kept is False:
        return warning(
            "clock",
            f"{shown}; nobody keeps it in step (no NTP, as far as the kernel knows)",
            "run chrony or systemd-timesyncd where several machines are used: leases do not need "
            "it, but certificates and the times in logs do",
        )
    return ok("clock", shown)


def host_name(name: str) -> Finding:
    """Ray, and trainers on other machines, look it up."""
    found: list[str] = []

    def look_up() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except OSError as error:
            found.append(f"error: {error}")

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(SLOW_NAME_S)
    if not found or found[0].startswith("error"):
        why = found[0].removeprefix("error: ") if found else f"no answer within {SLOW_NAME_S:g} s"
        return warning(
            "host name",
            f"{name} cannot be looked up ({why})",
            "name it in /etc/hosts or DNS: Ray asks for it at every start",
        )
    return ok("host name", f"{name} is {found[0]}")
