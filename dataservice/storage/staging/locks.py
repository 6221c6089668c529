"""Locks on files of a cache directory, between the threads and processes that share it.

Invariants: a lock ends with its process, however that ends; waiting for one has a deadline; a lock
is of the file that has the name now, also where the folder was removed or replaced; no descriptor
is handed on to a program that is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator

from dataservice.errors import StorageError

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.02


class FileLock:
    """An exclusive lock on a file, which is made, with its folder, when it is not there. Not
    reentrant."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[int]:
        """The file's descriptor, locked. Raises StorageError when somebody holds it for longer,
        OSError when it cannot be made."""
        ends = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            raise self._taken(timeout_s)
        try:
            pause_s = _FIRST_PAUSE_S
            while not (self._is_open() and try_lock(self._fd) and is_file_at(self._path, self._fd)):
                if time.monotonic() >= ends:
                    raise self._taken(timeout_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            try:
                yield self._fd
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        with self._threads:
            self._close()

    def _is_open(self) -> bool:
        """After making it so; the descriptor of a file that lost its name is given up."""
        if self._fd >= 0 and not is_file_at(self._path, self._fd):
            self._close()
        if self._fd < 0:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = open_file(self._path)
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _taken(self, timeout_s: float) -> StorageError:
        return StorageError(
            f"{self._path} is locked by another process for more than {timeout_s:g} s; is one of "
            "the jobs that share the directory stopped?"
        )


def open_file(path: str) -> int:
    """A descriptor for reading and writing; the file is made when it is not there. OSError for a
    link, which could lead to an original."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def is_file_at(path: str, fd: int) -> bool:
    """Whether the open file still has the name."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def try_lock(fd: int) -> bool:
    """Lock the open file unless somebody else has it open and locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
