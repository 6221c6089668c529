"""The files of a cache directory: complete copies, and beside them those in progress.

Invariants: a copy has its name only when it is complete and on disk; a copy in progress is locked
by whoever makes it, so there is one at a time and what a dead process left is told apart; nothing
but files named here is ever removed, and never an original.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass

from dataservice.storage.staging.locks import is_file_at, open_file, try_lock
from dataservice.storage.tables import TEMPORARY_PREFIX, sync_folder

_COPY = re.compile(r"[0-9a-f]{32}-[\w.-]+")
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"([0-9a-f]{32}-[\w.-]+)")


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the directory, name of the copy -> bytes."""

    copies: dict[str, int]
    arriving: dict[str, int]
    """Being made by a live process."""


class CacheFolder:
    """`scan`, `begin`, `publish` and `evict` need the directory's lock."""

    def __init__(self, path: str) -> None:
        self.path = path

    def scan(self) -> Found:
        """Looks at every file; removes what a crash left half copied."""
        found = Found({}, {})
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # a reader removes a damaged copy
                self._look_at(entry, found)
        return found

    def begin(self, name: str, size_bytes: int) -> int | None:
        """A locked, empty file with room on the disk for the copy; None when somebody makes it now.

        OSError where there is no room on the disk.
        """
        path = self._temporary(name)
        fd = open_file(path)
        try:
            if not try_lock(fd):
                os.close(fd)
                return None
            os.ftruncate(fd, 0)
            if size_bytes:
                os.posix_fallocate(fd, 0, size_bytes)
        except BaseException:
            self.give_up(name, fd)
            raise
        return fd

    def publish(self, name: str, fd: int) -> None:
        """Give a complete copy that is on disk its name, and let go of it; OSError, and it is not
        let go of, where somebody removed it or it cannot be named."""
        path = self._temporary(name)
        if not is_file_at(path, fd):
            raise FileNotFoundError(errno.ENOENT, "somebody removed the copy", path)
        os.rename(path, os.path.join(self.path, name))
        os.close(fd)

    def give_up(self, name: str, fd: int) -> None:
        """Remove a copy in progress; where that fails, the next scan does."""
        path = self._temporary(name)
        with contextlib.suppress(OSError):
            if is_file_at(path, fd):
                os.unlink(path)
        os.close(fd)

    def sync(self) -> None:
        """Make names durable: a copy whose name is lost with the power is only made again."""
        with contextlib.suppress(OSError):
            sync_folder(self.path)

    def evict(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, name))

    def free_bytes(self) -> int:
        """That this process may still write on the disk."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def _look_at(self, entry: os.DirEntry[str], found: Found) -> None:
        if not entry.is_file(follow_symlinks=False):
            return
        if _COPY.fullmatch(entry.name):
            found.copies[entry.name] = entry.stat().st_size
        elif match := _TEMPORARY.fullmatch(entry.name):
            size = _arriving_bytes(entry.path)
            if size is None:
                os.unlink(entry.path)
            else:
                found.arriving[match[1]] = size

    def _temporary(self, name: str) -> str:
        return os.path.join(self.path, TEMPORARY_PREFIX + name)


def _arriving_bytes(path: str) -> int | None:
    """None when nobody makes the copy any more."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return None if try_lock(fd) else os.fstat(fd).st_size
    finally:
        os.close(fd)
