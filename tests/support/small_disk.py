"""A small file system of its own (tmpfs) that can be filled up, where mounting is permitted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILLER = "filler"


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[bool]:
    """Mounted at `folder`, which is made; False, and a plain folder, where it may not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    mount = shutil.which("mount")
    mounted = mount is not None and _run(command)
    try:
        yield mounted
    finally:
        if mounted:
            _run(["umount", "--lazy", str(folder)])


def _run(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def fill(folder: Path) -> None:
    """Until not a byte fits."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                size = size if file.write(bytes(size)) else 0
            except OSError:
                size //= 2


def free(folder: Path) -> None:
    (folder / FILLER).unlink(missing_ok=True)
