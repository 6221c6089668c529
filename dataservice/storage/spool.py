"""Columns that grow while a record file is read, on disk once they are large.

Invariants: at most `_HELD_BYTES` of a column are in memory before `finish`, whose array is over an
unnamed file then, which the system frees with its last user.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_HELD_BYTES = 4 * 1024 * 1024
_STEP = 1 << 19
"""Values that are copied at a time."""


class Spool:
    """One column."""

    def __init__(self, kind: str, folder: str) -> None:
        """`kind` is a numpy dtype; `folder` is where a large column goes."""
        self._kind = np.dtype(kind)
        self._folder = folder
        self._parts: list[NDArray[Any]] = []
        self._held = 0
        self._file: IO[bytes] | None = None
        self.num_values = 0

    def add(self, values: ArrayLike) -> None:
        part = np.asarray(values).astype(self._kind)
        self._parts.append(part)
        self._held += part.nbytes
        self.num_values += len(part)
        if self._held > _HELD_BYTES:
            self._write()

    def finish(self) -> NDArray[Any]:
        """All values; nothing may be added any more."""
        if self._file is None:
            return np.concatenate([np.zeros(0, self._kind), *self._parts])
        self._write()
        self._file.flush()
        values = np.memmap(self._file, dtype=self._kind, mode="r", shape=(self.num_values,))
        self._file.close()
        return values

    def close(self) -> None:
        """Needed where `finish` was not called."""
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)
        for part in self._parts:
            self._file.write(part.data)
        self._parts.clear()
        self._held = 0


def joined(kind: str, folder: str, columns: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """One after the other."""
    spool = Spool(kind, folder)
    for column in columns:
        for start in range(0, len(column), _STEP):
            spool.add(column[start : start + _STEP])
    return spool.finish()
