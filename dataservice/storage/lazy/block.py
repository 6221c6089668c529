"""A block: 64 rows of the index that follow each other in one record file, and its bytes.

Invariants: the bytes follow from the rows alone and are read back exactly; what is read is checked,
so that bytes from another process cannot give rows that do not belong together. A block of usual
records has about 2 kB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dataservice.errors import WireError
from dataservice.storage.index_rows import (
    IMAGE_COLUMNS,
    SAMPLE_COLUMNS,
    FolderFile,
    Rejected,
    Rows,
)
from dataservice.storage.records import LAYOUTS

BLOCK_ROWS = 64

Ints = NDArray[np.int64]
Columns = Mapping[str, NDArray[np.unsignedinteger[Any]]]


def num_blocks(num_rows: int) -> int:
    return -(-num_rows // BLOCK_ROWS)


@dataclass(frozen=True, kw_only=True)
class Block:
    """N rows with I images, those of a row one after the other."""

    samples: Columns
    """[N] by name, index_rows.SAMPLE_COLUMNS."""
    images: Columns
    """[I] by name, index_rows.IMAGE_COLUMNS; `archive` counts in `archives`, and behind them in
    `inside`."""
    archives: tuple[str, ...]
    """URLs of the archives and folders that the images are in."""
    files: tuple[FolderFile, ...]
    """`archive` as in `images`."""
    inside: tuple[str, ...]
    rejected: tuple[Rejected, ...]

    @cached_property
    def image_starts(self) -> Ints:
        """int64 [N + 1]: the images of row i are image_starts[i]:[i+1]."""
        starts = np.zeros(len(self.samples["num_images"]) + 1, dtype=np.int64)
        np.cumsum(self.samples["num_images"], out=starts[1:])
        return starts

    @cached_property
    def in_folder(self) -> NDArray[np.bool_]:
        """bool [I]: which images are files of folders; `member` is then a number in `files`."""
        folders = np.unique([file.archive for file in self.files])
        return np.isin(self.images["archive"], folders)


class _Columns(msgspec.Struct, array_like=True):
    width: list[int]
    """Bytes of a value, by column."""
    data: list[bytes]


class _Stored(msgspec.Struct, array_like=True):
    samples: _Columns
    images: _Columns
    archives: list[str]
    files: list[tuple[int, str, int, int]]
    inside: list[str]
    rejected: list[tuple[int, int, int, str]]


_DECODER = msgspec.msgpack.Decoder(_Stored)


def encode_block(rows: Rows, urls: Sequence[str]) -> bytes:
    """`urls` are those of the archives that the rows' images count in."""
    archive = rows.images["archive"]
    inside = archive >= len(urls)
    used = np.unique([*archive[~inside].tolist(), *(file.archive for file in rows.files)])
    images = dict(rows.images)
    images["archive"] = np.where(
        inside, archive - len(urls) + len(used), np.searchsorted(used, archive)
    )
    number = {old: new for new, old in enumerate(used.astype(np.int64).tolist())}
    return msgspec.msgpack.encode(
        _Stored(
            samples=_narrow(rows.samples, SAMPLE_COLUMNS),
            images=_narrow(images, IMAGE_COLUMNS),
            archives=[urls[old] for old in number],
            files=[(number[f.archive], f.name, f.size_bytes, f.mtime_ns) for f in rows.files],
            inside=list(rows.inside),
            rejected=[(r.row, r.line, r.offset, r.reason) for r in rows.rejected],
        )
    )


def decode_block(data: bytes) -> Block:
    """Raises WireError for bytes that are no block."""
    try:
        stored = _DECODER.decode(data)
        samples = _columns(stored.samples, SAMPLE_COLUMNS)
        images = _columns(stored.images, IMAGE_COLUMNS)
        block = Block(
            samples=samples,
            images=images,
            archives=tuple(stored.archives),
            files=tuple(
                FolderFile(archive=archive, name=name, size_bytes=size, mtime_ns=mtime)
                for archive, name, size, mtime in stored.files
            ),
            inside=tuple(stored.inside),
            rejected=tuple(
                Rejected(row=row, line=line, offset=offset, reason=reason)
                for row, line, offset, reason in stored.rejected
            ),
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"{len(data)} bytes are no counted block: {error}") from error
    _check(block, len(data))
    return block


def _check(block: Block, size_bytes: int) -> None:
    counts, images = block.samples["num_images"], block.images
    if len(counts) > BLOCK_ROWS or int(counts.sum()) != len(images["width"]):
        raise WireError(
            f"{size_bytes} bytes are no counted block: {len(counts)} rows with {counts.sum()} "
            f"images, and {len(images['width'])} images"
        )
    if int(block.samples["num_docs"].min(initial=1)) < 1:
        raise WireError(f"{size_bytes} bytes are no counted block: a row of no document")
    for what, values, below in (
        ("layout", block.samples["layout"], len(LAYOUTS)),
        ("archive", images["archive"], len(block.archives) + len(block.inside)),
        ("file", images["member"][block.in_folder], len(block.files)),
    ):
        if int(values.max(initial=0)) >= max(below, 1):
            raise WireError(f"{size_bytes} bytes are no counted block: {what} {values.max()}")


def _narrow(columns: Mapping[str, Ints], names: Sequence[str]) -> _Columns:
    """Each column in as few bytes a value as its largest needs."""
    found = _Columns(width=[], data=[])
    for name in names:
        values = columns[name]
        largest = int(values.max(initial=0))
        width = next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width - (width == 8)))
        found.width.append(width)
        found.data.append(values.astype(f"<u{width}").tobytes())
    return found


def _columns(stored: _Columns, names: Sequence[str]) -> dict[str, NDArray[np.unsignedinteger[Any]]]:
    columns = {
        name: np.frombuffer(data, dtype=_dtype(width))
        for name, width, data in zip(names, stored.width, stored.data, strict=True)
    }
    if len({len(values) for values in columns.values()}) != 1:
        raise ValueError("columns of different lengths")
    return columns


def _dtype(width: int) -> str:
    if width not in (1, 2, 4, 8):
        raise ValueError(f"values of {width} bytes")
    return f"<u{width}"
