"""A temporary folder that goes with its process, however that ends.

Invariants: a folder is removed by the process that made it, or, where that was killed, by the next
one that makes one of the kind; one whose process lives is left alone, and so is any that has no
lock of ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "dataservice.lock"
"""Locked for as long as the process lives that made the folder."""


@contextmanager
def own_folder(prefix: str) -> Iterator[str]:
    """Path of a new folder below the machine's temporary one."""
    _remove_left_behind(prefix)
    folder = tempfile.mkdtemp(prefix=prefix)
    descriptor = os.open(f"{folder}/{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(f"{folder}/{LOCK}.new", f"{folder}/{LOCK}")  # none is ever seen unlocked
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left_behind(prefix: str) -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        with suppress(OSError):  # locked, gone meanwhile, or another user's
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
