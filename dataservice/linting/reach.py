"""How far a lint is: bytes of files that lie behind, of all that are to be looked at.

Invariants: what is done never goes back and never passes what is expected; a file counts with its
stored size, whatever it unpacks to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dataservice.errors import StorageError
from dataservice.linting.targets import below
from dataservice.storage.backends import local_path
from dataservice.storage.listing import FoundFile


class Reach:
    """Of one lint."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._whole = 0
        self._part = 0
        self._size = 0
        self.file = ""

    @property
    def done_bytes(self) -> int:
        return min(self._whole + self._part, self.total_bytes)

    def expect(self, size_bytes: int) -> None:
        self.total_bytes += size_bytes

    def expect_all(self, files: Sequence[FoundFile | StorageError]) -> None:
        """Files, and what is below folders of this machine, as far as it can be had."""
        for file in files:
            if isinstance(file, StorageError):
                continue
            if not file.stat.is_folder:
                self.expect(file.stat.size_bytes)
            elif (path := local_path(file.url)) is not None:
                self.expect(sum(_size(name) for name in below(path)))

    def begin(self, file: FoundFile) -> None:
        """The one before it is done."""
        self.end()
        self._size, self.file = file.stat.size_bytes, file.url

    def within(self, content_bytes: int) -> None:
        """So much of its content lies behind."""
        self._part = max(self._part, min(content_bytes, self._size))

    def end(self) -> None:
        self._whole += self._size
        self._size = self._part = 0


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
