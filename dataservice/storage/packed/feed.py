"""Reads of any size over chunks of any size, for decoders that pull.

Invariants: `take` returns what was asked for, less only at the end; holds at most one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from isal import igzip_lib

INFLATE_ERROR = cast("type[Exception]", igzip_lib.error)
"""Its stub says that it is an instance."""
SLICE_BYTES = 64 * 1024
"""What a decoder takes at a time."""
PIECE_BYTES = 16 * 1024
"""What it gives at a time: as much may be lost before damage."""


class Feed:
    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._chunk = b""
        self._at = 0
        self.position = 0
        """Bytes taken."""
        self.failed = False
        """Whether the chunks raised: the failure is not that of a decoder."""
        self.closed = False

    def take(self, size: int) -> bytes:
        data = self._chunk[self._at : self._at + size]
        self._at += len(data)
        if len(data) < size:
            parts = [data]
            missing = size - len(data)
            while missing and (chunk := self._next()):
                parts.append(chunk[:missing])
                self._chunk, self._at = chunk, min(missing, len(chunk))
                missing -= self._at
            data = b"".join(parts)
        self.position += len(data)
        return data

    def give_back(self, data: bytes) -> None:
        """The next `take` starts with it: the end of what was taken last."""
        self.position -= len(data)
        if len(data) <= self._at:
            self._at -= len(data)
        else:
            self._chunk = data + self._chunk[self._at :]
            self._at = 0

    def _next(self) -> bytes:
        try:
            for chunk in self._chunks:
                if chunk:
                    return chunk
        except BaseException:
            self.failed = True
            raise
        return b""

    # ---- what pyarrow.PythonFile asks of a file

    def read(self, size: int = -1) -> bytes:
        return self.take(size if size >= 0 else SLICE_BYTES)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
