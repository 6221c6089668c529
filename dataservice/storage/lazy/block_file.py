"""The counted blocks of one record file on disk: one append-only file, checked record by record.

A file begins with a mark; a record is a head (mark, block number, payload length, CRC-32 of the
payload, CRC-32 of the head so far) and the payload. Invariants: a record is written once and never
changed; an unfinished one at the end is cut off by who writes next; damage elsewhere costs the
blocks it hit and no other, also in the mark at the front: they are missing, and counted again.
Several processes may write, one at
a time, each behind what the others wrote. An appended record outlives its process at once, and the
machine once the system has written it out. Memory: 12 bytes a block of the record file, counted or
not.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import StorageError

MAX_BLOCK_BYTES = 15 * 1024 * 1024
_FILE_MARK = b"vlm-dataservice counted blocks 1\n"
_MARK = b"\x9eBK\n"
_HEAD = struct.Struct("<4sIIII")
_CHECKED = _HEAD.size - 4
"""Bytes of the head that its own CRC is over."""
_SEARCH_BYTES = 1024 * 1024
_LOCK_WAIT_S = 10.0
_LOCK_RETRY_S = 0.01


class BlockFile:
    """One thread at a time. `num_blocks` is how many the record file has."""

    def __init__(self, path: str, num_blocks: int) -> None:
        """Raises StorageError when the file cannot be opened."""
        self.path = path
        self._at: NDArray[np.int64] = np.full(num_blocks, -1, dtype=np.int64)
        """Where each block's payload begins; -1: not counted."""
        self._length: NDArray[np.uint32] = np.zeros(num_blocks, dtype=np.uint32)
        self._fd = -1
        self._end = 0
        """Of the last whole record that was seen; 0 before the file has its mark."""
        self._look()

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [len(numbers)]: which of the blocks are kept. Raises StorageError."""
        found: NDArray[np.bool_] = self._at[numbers] >= 0
        if not found.all():
            self._look()  # another process may have counted them
            found = self._at[numbers] >= 0
        return found

    def kept(self) -> NDArray[np.int64]:
        """int64: numbers of the blocks that are kept, ascending."""
        return np.flatnonzero(self._at >= 0)

    def read(self, number: int) -> bytes | None:
        """A block's payload; None when it is not kept, or damaged and from now on not kept. Raises
        StorageError."""
        at, length = int(self._at[number]), int(self._length[number])
        if at < 0:
            return None
        head = self._head(at - _HEAD.size)
        payload = self._bytes(at, length)
        if head is not None and head[:2] == (number, length) and zlib.crc32(payload) == head[2]:
            return payload
        self._at[number] = -1
        return None

    def append(self, number: int, payload: bytes) -> bool:
        """Keeps a block; False when it was kept before, also by another process. Raises
        StorageError; the file then has what it had before."""
        if not 0 <= number < len(self._at):
            raise IndexError(f"{self.path} has {len(self._at)} blocks, not one of number {number}")
        if len(payload) > MAX_BLOCK_BYTES:
            raise ValueError(f"a block of {len(payload)} bytes, over {MAX_BLOCK_BYTES}")
        with self._written():
            if self._at[number] >= 0:
                return False
            try:
                if not self._end:
                    self._write(_FILE_MARK)
                start = self._end
                self._write(_head(number, payload) + payload)
            except OSError as error:
                os.ftruncate(self._fd, self._end)
                raise StorageError(f"counted blocks {self.path}: {error}") from error
            self._note(number, start, len(payload))
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _written(self) -> Iterator[None]:
        """While nobody else writes, and with an end that is a whole record's."""
        if self._fd < 0:
            self._open(os.O_RDWR | os.O_CREAT)
        self._lock()
        try:
            self._look()
            if self._end < os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, self._end)
            yield
        except OSError as error:
            raise StorageError(f"counted blocks {self.path}: {error}") from error
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StorageError(
                        f"counted blocks {self.path}: another process has written to it for "
                        f"{_LOCK_WAIT_S:g} s"
                    ) from None
                time.sleep(_LOCK_RETRY_S)
            except OSError as error:
                raise StorageError(f"counted blocks {self.path}: {error}") from error

    def _look(self) -> None:
        """Opens the file where it is there, and notes the records behind those that are known."""
        if self._fd < 0 and not os.path.exists(self.path):
            return
        if self._fd < 0:
            self._open(os.O_RDWR if os.access(self.path, os.W_OK) else os.O_RDONLY)
        size = os.fstat(self._fd).st_size
        if not self._end:
            start = self._bytes(0, len(_FILE_MARK))
            if len(start) < len(_FILE_MARK) and _FILE_MARK.startswith(start):
                return  # somebody begins it now, or was killed when it did
            self._end = len(_FILE_MARK)
        at = self._end
        while (head := self._head(at, size)) or (at := self._next_mark(at + 1, size)) >= 0:
            if head:
                if head[0] < len(self._at):
                    self._note(head[0], at, head[1])
                at = self._end = at + _HEAD.size + head[1]

    def _open(self, flags: int) -> None:
        try:
            self._fd = os.open(self.path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"counted blocks {self.path}: {error}") from error

    def _write(self, data: bytes) -> None:
        """Behind the last record. Raises OSError."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, memoryview(data)[done:], self._end + done)
        self._end += len(data)

    def _head(self, at: int, size: int | None = None) -> tuple[int, int, int] | None:
        """(number, length, CRC-32) of the record at `at`; None where none is, or its payload would
        reach past `size`."""
        data = self._bytes(at, _HEAD.size)
        if len(data) < _HEAD.size:
            return None
        mark, number, length, crc, check = _HEAD.unpack(data)
        if mark != _MARK or zlib.crc32(data[:_CHECKED]) != check:
            return None
        if size is not None and at + _HEAD.size + length > size:
            return None
        return number, length, crc

    def _next_mark(self, at: int, size: int) -> int:
        """Where a record may begin at `at` or after it; -1: nowhere."""
        while at < size:
            found = self._bytes(at, _SEARCH_BYTES).find(_MARK)
            if found >= 0:
                return at + found
            at += _SEARCH_BYTES - len(_MARK) + 1
        return -1

    def _bytes(self, at: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, at)
        except OSError as error:
            raise StorageError(f"counted blocks {self.path}: {error}") from error

    def _note(self, number: int, start: int, length: int) -> None:
        self._length[number] = length
        self._at[number] = start + _HEAD.size


def _head(number: int, payload: bytes) -> bytes:
    head = _HEAD.pack(_MARK, number, len(payload), zlib.crc32(payload), 0)[:_CHECKED]
    return head + struct.pack("<I", zlib.crc32(head))
