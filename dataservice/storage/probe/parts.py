"""The parts of a picture that have been read, and more of them when they are asked for.

Invariants: what was read first stays; besides it one later part is kept. Steps from part to part
are bounded, so that no file costs more than about a second.
"""

from __future__ import annotations

from collections.abc import Callable

from dataservice.errors import ImageError

FIRST_READ_BYTES = 8 * 1024 - 64
"""The rest of 8 KiB is for a look at the end of a PNG."""
NEXT_READ_BYTES = 4 * 1024
MAX_STEPS = 65_536
"""Segments, chunks or blocks before the pixels."""
MAX_METADATA_BYTES = 1024 * 1024

ReadPart = Callable[[int, int], bytes]
"""(offset, size) -> those bytes of the picture, fewer only past its end."""


class Parts:
    """Bytes of a picture of `size` bytes."""

    __slots__ = ("_head", "_read", "data", "size", "start")

    def __init__(self, read: ReadPart, size: int, head: bytes) -> None:
        self._read = read
        self._head = head
        self.size = size
        self.data = head
        self.start = 0

    def around(self, at: int, size: int) -> tuple[bytes, int]:
        """A part that holds `size` bytes at `at`, fewer only at the end, and where it starts."""
        if at < self.start or at + size > self.start + len(self.data):
            if at >= self.size:
                raise cut_off()
            self.data = self._read(at, min(max(size, NEXT_READ_BYTES), self.size - at))
            self.start = at
            if len(self.data) < min(size, self.size - at):  # a member that claims too much
                raise cut_off()
        return self.data, self.start

    def some(self, at: int, size: int) -> bytes:
        """Those bytes, fewer only at the end."""
        stop = at + size
        if stop <= len(self._head):
            return self._head[at:stop]
        if at >= self.start and stop <= self.start + len(self.data):
            return self.data[at - self.start : stop - self.start]
        return self._read(at, max(min(size, self.size - at), 0))

    def get(self, at: int, size: int) -> bytes:
        """Exactly those bytes; ImageError when the picture ends before."""
        data = self.some(at, size)
        if len(data) < size:
            raise cut_off()
        return data


def cut_off() -> ImageError:
    return ImageError("truncated: the header is cut off")
