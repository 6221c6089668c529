"""All counted blocks of a lazy index: one block file a record file.

Invariants: what one process keeps, the others find; see `block_file` for what survives what.
Thread-safe; at most `_OPEN_FILES` files are open.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.storage.lazy.block_file import BlockFile

_OPEN_FILES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFileName:
    name: str
    """In the index folder; names all that the blocks follow from."""
    num_blocks: int


class BlockStore:
    """`files` are the block files by number. Close it. Everything raises StorageError."""

    def __init__(self, index_dir: str, files: Sequence[BlockFileName]) -> None:
        self._index_dir = index_dir
        self._files = files
        self._lock = threading.Lock()
        self._open: OrderedDict[int, BlockFile] = OrderedDict()

    def missing(self, file: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the blocks of a file that are not kept."""
        with self._lock:
            return blocks[~self._file(file).has(blocks)]

    def read(self, file: int, block: int) -> bytes | None:
        """None where it is not kept, or damaged."""
        with self._lock:
            return self._file(file).read(block)

    def append(self, file: int, block: int, payload: bytes) -> bool:
        """Keeps a block; False when it was kept before."""
        with self._lock:
            return self._file(file).append(block, payload)

    def kept(self, file: int) -> list[int]:
        """Numbers of the blocks of a file that are kept."""
        if not os.path.exists(self._path(file)):
            return []
        with self._lock:
            return [int(number) for number in self._file(file).kept()]

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _path(self, file: int) -> str:
        return os.path.join(self._index_dir, self._files[file].name)

    def _file(self, file: int) -> BlockFile:
        if file not in self._open:
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[file] = BlockFile(self._path(file), self._files[file].num_blocks)
        self._open.move_to_end(file)
        return self._open[file]
