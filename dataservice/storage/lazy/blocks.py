"""The counted blocks of a lazy index as columns: rows of a record file by number, each block read
from its file when a row of it is asked for.

Invariants: a row is never guessed: what is not counted goes to `on_missing`, which counts it or
raises; at most `_KEPT_BLOCKS` blocks are held decoded (about 8 kB each). Thread-safe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.lru import LRUCache
from dataservice.errors import StorageError, WireError
from dataservice.storage.index_rows import FolderFile
from dataservice.storage.lazy.block import BLOCK_ROWS, Block, decode_block, num_blocks
from dataservice.storage.lazy.block_store import BlockStore
from dataservice.storage.lazy.build import OFFSETS
from dataservice.storage.lazy.counting import BlockPlace
from dataservice.storage.lazy.manifest import LazyManifest, LazyShard, LazySource
from dataservice.storage.tables import Column, Table

_KEPT_BLOCKS = 4096
_KEPT_TABLES = 1024
_KEPT_DRAWS = 64
_BLOCK_SHIFT = 32

Ints = NDArray[np.int64]
Numbers = NDArray[np.integer[Any]]
Key = tuple[int, int]
"""(number of the record file over all sources, block)."""


class BlocksMissing(Exception):
    """Blocks that must be counted first."""

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__(f"{len(keys)} blocks are not counted yet")
        self.keys = keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a block that was not kept before holds."""

    rows: int
    rejected: int


class Blocks:
    """`on_missing` may be set at any time: it raises, or counts and keeps all that it is given."""

    def __init__(self, index_dir: str, manifest: LazyManifest, store: BlockStore) -> None:
        self._index_dir = index_dir
        self._store = store
        self._shards: list[tuple[LazySource, LazyShard]] = [
            (source, shard) for source in manifest.sources for shard in source.shards
        ]
        self._decoded: LRUCache[Key, Block] = LRUCache(_KEPT_BLOCKS)
        self._tables: LRUCache[int, Table] = LRUCache(_KEPT_TABLES)
        self._draws: LRUCache[int, Ints] = LRUCache(_KEPT_DRAWS)
        self.on_missing: Callable[[Sequence[Key]], None] = _raise_missing

    def missing(self, file: int, rows: Ints) -> list[Key]:
        """The blocks with some rows of a file that are not kept."""
        wanted = np.unique(rows // BLOCK_ROWS)
        return [(file, int(block)) for block in self._store.missing(file, wanted)]

    def still_missing(self, keys: Sequence[Key]) -> list[Key]:
        """Those of the blocks that are not kept, file by file."""
        by_file: dict[int, list[int]] = {}
        for file, block in keys:
            by_file.setdefault(file, []).append(block)
        return [
            (file, int(block))
            for file, blocks in by_file.items()
            for block in self._store.missing(file, np.array(blocks, dtype=np.int64))
        ]

    def place(self, key: Key) -> BlockPlace:
        """What a block is counted from."""
        file, block = key
        source, shard = self._shards[file]
        rows = self._rows(file, shard, block)
        table = self._offsets(file, shard)
        offsets = table.columns
        at_end = len(rows) > 0 and rows[-1] == table.num_rows - 1
        return BlockPlace(
            file=file,
            block=block,
            shard=shard.ref(source.name),
            offset=offsets["offset"].take(rows).astype(np.uint64),
            length=offsets["length"].take(rows).astype(np.uint32),
            beside=shard.beside,
            unread=table.meta["unread"] if at_end else "",
        )

    def keep(self, key: Key, payload: bytes) -> Kept | None:
        """Keeps a counted block; None when it was kept before. Raises WireError for bytes that are
        not of this block, StorageError."""
        if not self._is_block(key):
            raise WireError(f"there is no block {key[1]} of record file {key[0]}")
        block, place = decode_block(payload), self.place(key)
        if not np.array_equal(block.samples["offset"], place.offset):
            raise WireError(
                f"what was counted is not block {key[1]} of {place.shard.source}/{place.shard.name}"
            )
        if not self._store.append(*key, payload):
            return None
        return Kept(rows=len(place.offset), rejected=len(block.rejected))

    def get(self, key: Key) -> Block:
        """Raises what `on_missing` raises, StorageError."""
        return self._decoded.get(key, lambda: self._read(key))

    def peek(self, key: Key) -> Block | None:
        """None where it is not kept, or damaged. Raises StorageError."""
        payload = self._store.read(*key)
        return None if payload is None else decode_block(payload)

    def kept(self, file: int) -> list[int]:
        """Numbers of a file's counted blocks."""
        return self._store.kept(file)

    def _is_block(self, key: Key) -> bool:
        file, block = key
        if not 0 <= file < len(self._shards):
            return False
        return 0 <= block < num_blocks(self._shards[file][1].num_rows)

    def _read(self, key: Key) -> Block:
        payload = self._store.read(*key)
        if payload is None:
            self.on_missing([key])
            payload = self._store.read(*key)
        if payload is None:
            raise StorageError(f"block {key[1]} of record file {key[0]} was counted and not kept")
        return decode_block(payload)

    def _offsets(self, file: int, shard: LazyShard) -> Table:
        path = os.path.join(self._index_dir, shard.offsets.name)
        return self._tables.get(
            file, lambda: Table(path, OFFSETS, size_bytes=shard.offsets.size_bytes)
        )

    def _rows(self, file: int, shard: LazyShard, block: int) -> Ints:
        """Numbers of a block's records in their file."""
        stop = min((block + 1) * BLOCK_ROWS, shard.num_rows)
        rows = np.arange(block * BLOCK_ROWS, stop, dtype=np.int64)
        if shard.taken is None:
            return rows
        if shard.taken.drawn is None:
            return rows + shard.taken.start
        return self._draws.get(file, shard.taken.rows)[rows]


def _raise_missing(keys: Sequence[Key]) -> None:
    raise BlocksMissing(keys)


class Places:
    """What the images of one record file's blocks are in, numbered as it is met."""

    def __init__(self, add: Callable[[str, bool], None]) -> None:
        """`add` is told of each new place, in order: (URL of an archive or folder, False) or
        (place inside the record file, True)."""
        self._add = add
        self._numbers: dict[tuple[str, bool], int] = {}
        self._lock = threading.Lock()

    def of(self, block: Block) -> Ints:
        """By the number that the block's images have for it."""
        named = [(url, False) for url in block.archives] + [(at, True) for at in block.inside]
        with self._lock:
            for place in named:
                if place not in self._numbers:
                    self._add(*place)
                    self._numbers[place] = len(self._numbers)
            return np.array([self._numbers[place] for place in named], dtype=np.int64)


class BlockColumn:
    """A `tables.Column` over the blocks of one record file."""

    def __init__(
        self, blocks: Blocks, file: int, value: Callable[[int, Block], Numbers], *, shift: int
    ) -> None:
        """`value` are a block's values of the column; a row is (block << shift) + its place in
        them."""
        self._blocks = blocks
        self._file = file
        self._value = value
        self._shift = shift

    def take(self, rows: Ints) -> Ints:
        block, place = rows >> self._shift, rows & ((1 << self._shift) - 1)
        found = np.empty(len(rows), dtype=np.int64)
        order = np.argsort(block, kind="stable")
        numbers, starts = np.unique(block[order], return_index=True)
        for number, where in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            found[where] = self._of(number)[place[where]]
        return found

    def item(self, row: int) -> int:
        return int(self._of(row >> self._shift)[row & ((1 << self._shift) - 1)])

    def slice(self, start: int, stop: int) -> Ints:
        return self.take(np.arange(start, stop, dtype=np.int64))

    def _of(self, number: int) -> Numbers:
        return self._value(number, self._blocks.get((self._file, number)))


def sample_columns(blocks: Blocks, file: int) -> dict[str, Column]:
    """By name of `tables.SAMPLES` but by_kind; rows as the index counts them."""
    shift = BLOCK_ROWS.bit_length() - 1
    return {
        name: BlockColumn(blocks, file, partial(_sample, name), shift=shift)
        for name in (
            "offset",
            "length",
            "crc32",
            "text_tokens",
            "loss_tokens",
            "num_images",
            "layout",
            "num_docs",
            "image_start",
        )
    }


def image_columns(blocks: Blocks, file: int, places: Places) -> dict[str, Column]:
    """By name of `tables.IMAGES`; rows are those that `image_start` names."""
    return {
        name: BlockColumn(blocks, file, partial(_image, name, places), shift=_BLOCK_SHIFT)
        for name in ("archive", "member", "width", "height", "text_before", "markup", "probed")
    }


def folder_file(blocks: Blocks, file: int, member: int) -> FolderFile:
    """A file of a folder, by a value of the column `member`."""
    block = blocks.get((file, member >> _BLOCK_SHIFT))
    return block.files[member & ((1 << _BLOCK_SHIFT) - 1)]


def _sample(name: str, number: int, block: Block) -> Numbers:
    if name == "image_start":
        return block.image_starts[:-1] + (number << _BLOCK_SHIFT)
    return block.samples[name]


def _image(name: str, places: Places, number: int, block: Block) -> Numbers:
    values = block.images[name]
    if name == "archive":
        return places.of(block)[values]
    if name == "member" and block.files:
        return values.astype(np.int64) + block.in_folder * (number << _BLOCK_SHIFT)
    return values
