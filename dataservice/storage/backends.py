"""Where bytes come from: what every origin can do, and files of this machine by positioned reads.

Invariants: calls block and are not retried (objects.py adds deadline and retries); a descriptor is
never closed under a thread that reads it; at most `capacity` descriptors stay open between reads;
a forked child opens its own. Read errors are OSError or StorageError.
"""

from __future__ import annotations

import errno
import glob
import os
import stat as modes
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dataservice.storage.forks import renew_in_children

_NO_SUCH_FILE = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Of names that no file can have where they point."""
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_LATEST_NS = 2**63 - 1
"""Of mtimes in 64 bits: of the year 2262."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectStat:
    size_bytes: int
    mtime_ns: int
    """0 where the store has no mtime; an ETag makes the digits below a second."""
    is_folder: bool = False


class Backend(Protocol):
    """One kind of origin; blocking."""

    def stat(self, url: str) -> ObjectStat:
        """Raises FileNotFoundError."""

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        """Up to `size` bytes (fewer only at the end) and what the object was then."""

    def forget(self, url: str) -> None:
        """Open it anew at the next read: what is kept of it may be an older version."""

    def glob(self, pattern: str) -> dict[str, ObjectStat | None]:
        """Full names of the files (not folders) that match, sorted, with what they are where a
        listing says that."""

    def list_folder(self, folder: str, prefix: str) -> dict[str, ObjectStat | None] | None:
        """By their names in the folder, what begins with `prefix`, and more at the store's choice,
        from one listing; empty where there is no such folder, None for a store without listings."""

    def close(self) -> None: ...


def local_path(url: str) -> str | None:
    """The path of a local file, None for any other URL."""
    if url.startswith("file://"):
        return url[len("file://") :]
    return None if "://" in url else url


def without_query(url: str) -> str:
    """Up to the "?" of a URL; a local path as it is."""
    return url.partition("?")[0] if "://" in url else url


class _OpenFile:
    __slots__ = ("closing", "fd", "readers", "stat")

    def __init__(self, path: str) -> None:
        # A pipe or a device may be there by now; opening one must not wait for its other end.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self.fd)
        if not modes.S_ISREG(found.st_mode):
            os.close(self.fd)
            raise OSError(errno.EINVAL, "is no regular file", path)
        self.stat = _file_stat(found)
        self.readers = 0
        self.closing = False


class FileCache:
    """Open files by path, least recently used closed first."""

    def __init__(self, capacity: int = 128) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        renew_in_children(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        while self._files:
            os.close(self._files.popitem()[1].fd)

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        """Up to `size` bytes, fewer only at the end, and what the file is after that."""
        file = self._acquire(path)
        try:
            data = _pread(file.fd, offset, size)
            now = os.fstat(file.fd)
            if (now.st_mtime_ns, now.st_size) != (file.stat.mtime_ns, file.stat.size_bytes):
                file.stat = _file_stat(now)
            return data, file.stat
        except OSError:
            self.discard(path)
            raise
        finally:
            self._release(file)

    def read_cached(self, path: str, offset: int, size: int) -> tuple[bytes, ObjectStat] | None:
        """As `read`, without ever waiting for a disk; None unless the file is open and the whole
        range in memory. File systems that may wait for a network have nothing in memory."""
        with self._lock:
            file = self._files.get(path)
            if file is None or _NO_WAIT == 0:
                return None
            self._files.move_to_end(path)
            file.readers += 1
        buffer = bytearray(size)
        try:
            if os.preadv(file.fd, [buffer], offset, _NO_WAIT) != size:
                return None
            return bytes(buffer), _file_stat(os.fstat(file.fd))
        except OSError:
            return None
        finally:
            self._release(file)

    def discard(self, path: str) -> None:
        """Close the file once nobody reads it; the next read opens it anew."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None:
                self._close_when_idle(file)

    def discard_unlinked(self) -> int:
        """Close files that were removed, so that their space is freed; returns how many."""
        with self._lock:
            gone = [p for p, f in self._files.items() if os.fstat(f.fd).st_nlink == 0]
            for path in gone:
                self._close_when_idle(self._files.pop(path))
        return len(gone)

    def close(self) -> None:
        """A read that is still under way, or comes later, keeps no file open."""
        with self._lock:
            self._capacity = 0
            while self._files:
                self._close_when_idle(self._files.popitem()[1])

    def _acquire(self, path: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                file.readers += 1
                return file
        opened = _OpenFile(path)
        with self._lock:
            file = self._files.setdefault(path, opened)
            file.readers += 1
            if file is not opened:
                os.close(opened.fd)
            elif len(self._files) > self._capacity:
                self._close_when_idle(self._files.popitem(last=False)[1])
        return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.readers -= 1
            if file.closing and not file.readers:
                os.close(file.fd)

    def _close_when_idle(self, file: _OpenFile) -> None:
        file.closing = True
        if not file.readers:
            os.close(file.fd)


class LocalBackend:
    """Files of this machine and what is mounted on it. Pipes, devices and sockets are not there."""

    def __init__(self, *, max_open_files: int = 128) -> None:
        self._files = FileCache(max_open_files)

    def stat(self, url: str) -> ObjectStat:
        path = _path(url)
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno in _NO_SUCH_FILE:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise
        if not modes.S_ISREG(found.st_mode) and not modes.S_ISDIR(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "is no regular file", path)
        return _file_stat(found)

    def read(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat]:
        return self._files.read(_path(url), offset, size)

    def read_cached(self, url: str, offset: int, size: int) -> tuple[bytes, ObjectStat] | None:
        """As `FileCache.read_cached`."""
        return self._files.read_cached(_path(url), offset, size)

    def forget(self, url: str) -> None:
        self._files.discard(_path(url))

    def glob(self, pattern: str) -> dict[str, ObjectStat | None]:
        names = glob.glob(literal_front(os.path.abspath(_path(pattern))), recursive=True)
        found: dict[str, ObjectStat | None] = {}
        for name in sorted(names):
            with suppress(FileNotFoundError, PermissionError):
                stat = self.stat(name)
                if not stat.is_folder:
                    found[name] = stat
        return found

    def list_folder(self, folder: str, prefix: str) -> dict[str, ObjectStat | None] | None:
        try:
            with os.scandir(_path(folder)) as entries:
                return {entry.name: None for entry in entries if entry.name.startswith(prefix)}
        except FileNotFoundError:
            return {}

    def close(self) -> None:
        self._files.close()


def literal_front(pattern: str) -> str:
    """An absolute glob pattern, its longest front that is there by that very name escaped."""
    there = pattern
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    return glob.escape(there) + pattern[len(there) :]


def _path(url: str) -> str:
    path = local_path(url)
    if path is None:
        raise ValueError(f"not a local path: {url}")
    return path


def _pread(fd: int, offset: int, size: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    missing = size - len(data)
    while missing and (data := os.pread(fd, missing, offset + size - missing)):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def _file_stat(stat: os.stat_result) -> ObjectStat:
    folder = modes.S_ISDIR(stat.st_mode)
    mtime_ns = max(min(stat.st_mtime_ns, _LATEST_NS), -_LATEST_NS)
    return ObjectStat(size_bytes=stat.st_size, mtime_ns=mtime_ns, is_folder=folder)
