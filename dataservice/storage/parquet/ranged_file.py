"""Positioned reads as the file object that Arrow wants.

Invariants: nothing is kept; never reads past the end.
"""

from __future__ import annotations

import os

from dataservice.storage.reads import ReadAt


class RangedFile:
    def __init__(self, read: ReadAt, size_bytes: int) -> None:
        self._read = read
        self._size = size_bytes
        self._position = 0
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        size = left if size < 0 else min(size, left)
        data = self._read(self._position, size) if size else b""
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
