"""Free memory as the kernel's files tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_client.free_memory import UNKNOWN_BYTES, free_bytes

V2 = "0::/job/step\n"
V1 = "4:memory:/job\n1:cpu:/\n0::/\n"


def system(root: Path, cgroup: str = "0::/\n", **groups: tuple[str, str, int]) -> Path:
    """`groups`: folder below the mount, "__" for "/" -> (limit, used, inactive file pages)."""
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n",
        "proc/self/cgroup": cgroup,
    }
    v1 = cgroup == V1
    mount = "sys/fs/cgroup/memory" if v1 else "sys/fs/cgroup"
    names = ("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")
    for folder, (limit, used, inactive) in groups.items():
        below = f"{mount}/{folder.replace('__', '/').replace('top', '')}"
        files |= {f"{below}/memory.{names[0]}": limit, f"{below}/memory.{names[1]}": used}
        files[f"{below}/memory.stat"] = f"anon 1\n{'total_' * v1}inactive_file {inactive}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_of_the_host(tmp_path: Path) -> None:
    assert free_bytes(system(tmp_path)) == 4000 * 1024
    assert free_bytes(tmp_path / "nothing") == UNKNOWN_BYTES
    assert 0 < free_bytes() < UNKNOWN_BYTES


@pytest.mark.parametrize("cgroup", [V2, V1])
def test_of_the_groups(tmp_path: Path, cgroup: str) -> None:
    root = system(tmp_path, cgroup, job=("1000000", "700000", 50000))
    assert free_bytes(root) == 350000
    assert free_bytes(system(tmp_path, cgroup, job=("max", "700000", 0))) == 4000 * 1024
    assert free_bytes(system(tmp_path, cgroup, job=("1000", "7000", 0))) == 0


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    groups = {"job": ("900000", "100000", 0), "job__step": ("1000000", "300000", 0)}
    assert free_bytes(system(tmp_path, V2, **groups)) == 700000


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    assert free_bytes(system(tmp_path, V2, top=("600000", "100000", 0))) == 500000
