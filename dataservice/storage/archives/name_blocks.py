"""Names of an archive's members on disk: compressed in blocks, read by row, never all held.

Invariants: block b has the names of rows [b * BLOCK_NAMES, (b + 1) * BLOCK_NAMES); as many blocks
are decoded at a time as the cache holds, about 25 kB each; a name costs about 3 bytes on disk where
names resemble their neighbours, and 10 us to read when its block is not decoded yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import zstandard
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache
from dataservice.errors import StaleIndexError
from dataservice.storage.tables import open_batch, write_batch

Ints = NDArray[np.int64]

BLOCK_NAMES = 256
NAMES = pa.schema([("block", pa.large_binary())])
_KEPT_BLOCKS = 8
_LEVEL = 1
_MAX_BLOCK_BYTES = BLOCK_NAMES * (65_535 + 8)


KeptBlocks = LRUCache[tuple[str, int], list[str]]
"""Decoded blocks, by file and number."""


class NameWriter:
    """Takes names in the order of their rows; holds them compressed."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._blocks: list[bytes] = []
        self._open: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self._open.append(name)
            if len(self._open) == BLOCK_NAMES:
                self._close_block()

    def write(self, path: str) -> int:
        """Returns the file's size in bytes."""
        if self._open:
            self._close_block()
        return write_batch(path, NAMES, [pa.array(self._blocks, type=pa.large_binary())])

    def _close_block(self) -> None:
        self._blocks.append(self._compressor.compress(msgspec.msgpack.encode(self._open)))
        self._open.clear()


class NameBlocks:
    """`names[row]` over a mapped file; thread-safe."""

    def __init__(
        self,
        path: str,
        num_names: int,
        *,
        size_bytes: int | None = None,
        kept: KeptBlocks | None = None,
    ) -> None:
        """`kept` may be shared with others; None = a small cache of its own."""
        batch = open_batch(path, size_bytes=size_bytes)
        blocks = -(-num_names // BLOCK_NAMES)
        if batch.schema != NAMES or batch.num_rows != blocks:
            raise StaleIndexError(f"{path} is not a table of this index version")
        self._path = path
        self._blocks: Any = batch.column(0)
        self._num_names = num_names
        self._kept: KeptBlocks = kept or LRUCache(_KEPT_BLOCKS)

    def __len__(self) -> int:
        return self._num_names

    def __getitem__(self, row: int) -> str:
        block, place = divmod(row, BLOCK_NAMES)
        return self._kept.get((self._path, block), lambda: self._block(block))[place]

    def take(self, rows: Ints) -> list[str]:
        """Each block is decoded once at most."""
        blocks, block_of = np.unique(rows // BLOCK_NAMES, return_inverse=True)
        decoded = [
            self._kept.get((self._path, block), partial(self._block, block))
            for block in blocks.tolist()
        ]
        places = zip(block_of.tolist(), (rows % BLOCK_NAMES).tolist(), strict=True)
        return [decoded[block][place] for block, place in places]

    def __iter__(self) -> Iterator[str]:
        for block in range(len(self._blocks)):
            yield from self._block(block)

    def _block(self, number: int) -> list[str]:
        stored = memoryview(self._blocks[number].as_buffer())
        try:
            data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=_MAX_BLOCK_BYTES)
            return msgspec.msgpack.decode(data, type=list[str])
        except (zstandard.ZstdError, msgspec.DecodeError) as error:
            raise StaleIndexError(
                f"{self._path} is damaged ({error}); run `dataservice index` again"
            ) from error
