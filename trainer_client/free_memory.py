"""How much memory this process may still allocate: the host's, within the limits of its cgroups.

Invariants: the least of all limits that apply; page cache that the kernel can drop counts as free;
a limit that cannot be read does not count.
"""

from __future__ import annotations

from pathlib import Path

UNKNOWN_BYTES = 1 << 62
"""Where nothing can be read."""


def free_bytes(root: Path = Path("/")) -> int:
    """Linux: /proc/meminfo, cgroup v2 and v1; UNKNOWN_BYTES on other systems."""
    limits = [_of_host(root)]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _of_groups(root / "sys/fs/cgroup", path, ("memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limits += _of_groups(root / "sys/fs/cgroup/memory", path, names)
    return min(limits)


def _of_host(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return UNKNOWN_BYTES


def _of_groups(mount: Path, path: str, names: tuple[str, str]) -> list[int]:
    """Of a group and those around it. In a container the path is often not below the mount: the
    mount itself is the container's group then."""
    inside = Path(path.lstrip("/"))
    found = []
    for folder in (inside, *inside.parents) if path != "/" else (inside,):
        limit, used = (_text(mount / folder / name).strip() for name in names)
        if limit.isdigit() and used.isdigit():
            found.append(max(0, int(limit) - int(used) + _droppable(mount / folder)))
    return found


def _droppable(group: Path) -> int:
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
