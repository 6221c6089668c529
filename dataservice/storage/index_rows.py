"""Records -> rows of the index: read, counted, their images found.

The full and the lazy index agree because both get their rows here.

Invariants: one row a record, in the order given; a record that cannot be used is a row without
tokens and images, and a `Rejected` that says why; the rows follow from the records, the source's
format, the counter and the archives, but for `again`, which says that a later look may differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import DataError, RecordError
from dataservice.storage.archives import ImageFinder
from dataservice.storage.counting import RecordCounter
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.index_images import FolderFile, RecordImages
from dataservice.storage.jsonl import Line
from dataservice.storage.recordfiles.finders import BYTE_ORDER_MARK
from dataservice.storage.records import LAYOUTS, Record, RecordReader
from dataservice.storage.sources import SourceFiles
from dataservice.storage.zips.methods import crc32

__all__ = [
    "IMAGE_COLUMNS",
    "SAMPLE_COLUMNS",
    "FolderFile",
    "Rejected",
    "RowReader",
    "Rows",
]

Ints = NDArray[np.int64]
SAMPLE_COLUMNS = (
    "offset",
    "length",
    "crc32",
    "text_tokens",
    "loss_tokens",
    "num_images",
    "layout",
    "num_docs",
)
IMAGE_COLUMNS = ("archive", "member", "width", "height", "text_before", "markup", "probed")
_PLACE_COLUMNS = ("archive", "member", "width", "height", "probed")

_MAX_LENGTH = 0xFFFFFFFF
_OPENED = {b"[": "array", b"{": "object"}
_LAYOUT_CODES = {name: code for code, name in enumerate(LAYOUTS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A record that cannot be used."""

    row: int
    """Its number among the rows of the call."""
    line: int
    """From 1."""
    offset: int
    """In bytes."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """N records with I images, those of a record one after the other."""

    samples: Mapping[str, Ints]
    """int64 [N] by name, SAMPLE_COLUMNS."""
    images: Mapping[str, Ints]
    """int64 [I] by name, IMAGE_COLUMNS. `archive` is a number in `ImageFinder.archives`; `member`
    is a row of that archive's member table, in a folder a number in `files`, and of an image that
    stands in its record its number there."""
    files: tuple[FolderFile, ...]
    """The files of folders that the images are, each once."""
    inside: tuple[str, ...]
    """Places in the record file itself, whose numbers follow those of `ImageFinder.archives`: ""
    for images that stand in their records, else the name of a Parquet column."""
    rejected: tuple[Rejected, ...]
    again: bool
    """An image could not be read for now, or was missing where a folder may get it later."""

    @property
    def num_rows(self) -> int:
        return len(self.samples["offset"])


class RowReader:
    """Reads records of one record file."""

    def __init__(
        self,
        files: SourceFiles,
        counter: RecordCounter,
        finder: ImageFinder,
        embedded: EmbeddedImages | None = None,
    ) -> None:
        """`embedded`: the images of the record file itself, where it is a Parquet file."""
        self._embedded = embedded
        self._read = RecordReader(files.format).read
        self._count_all = counter.count_all
        self._finder = finder

    def read(self, lines: Sequence[Line]) -> Rows:
        """The rows of some records; their images are looked up and their headers read together."""
        records = self._records(lines)
        found = RecordImages(self._finder, self._embedded, lines, records)
        samples: list[int] = []
        images: list[int] = []
        text_before: list[int] = []
        markups: list[int] = []
        rejected: list[Rejected] = []
        counts = iter(self._count_all([each for each in records if isinstance(each, Record)]))
        images_of = found.images_of
        for row, (line, record) in enumerate(zip(lines, records, strict=True)):
            offset, length, data = line.offset, line.length, line.data
            crc = 0 if data is None else crc32(data)
            try:
                if not isinstance(record, Record):
                    raise record
                counted = next(counts)
                places = images_of(row, record) if record.images else None
                if isinstance(counted, RecordError):
                    raise counted
                tokens = counted.text_tokens
                if tokens < 1 and not places:
                    raise RecordError("the record has no text and no image")
            except DataError as error:
                samples += (offset, min(length, _MAX_LENGTH), crc, 0, 0, 0, 0, 1)
                rejected.append(
                    Rejected(row=row, line=line.number, offset=offset, reason=str(error))
                )
                continue
            layout, num_images = _LAYOUT_CODES[record.layout], len(record.images)
            samples += (offset, length, crc, tokens, counted.loss_tokens, num_images, layout)
            samples.append(counted.num_docs)
            if places:
                images += places
                text_before += counted.image_positions
                markups += [counted.image_markup] * num_images
        return Rows(
            samples=_columns(SAMPLE_COLUMNS, samples),
            images={
                **_columns(_PLACE_COLUMNS, images),
                **_columns(("text_before",), text_before),
                **_columns(("markup",), markups),
            },
            files=tuple(found.files),
            inside=tuple(found.inside),
            rejected=tuple(rejected),
            again=found.again,
        )

    def _records(self, lines: Sequence[Line]) -> list[Record | DataError]:
        records: list[Record | DataError] = []
        add, read = records.append, self._read
        for line in lines:
            data = line.data
            try:
                add(RecordError(line.problem) if data is None else read(data))
            except DataError as error:
                add(_over_lines(line) or error)
        return records


def _over_lines(line: Line) -> RecordError | None:
    """Of the first line of a file that is an opening bracket and nothing else."""
    what = _OPENED.get((line.data or b"").strip())
    if what is None or line.number > 1 or line.offset not in (0, len(BYTE_ORDER_MARK)):
        return None
    return RecordError(
        f"the line is a bracket alone: the file looks like one JSON {what} over many lines, and is "
        "read line by line; name it .json"
    )


def _columns(names: Sequence[str], values: list[int]) -> dict[str, Ints]:
    """Of rows that stand one after the other."""
    table = np.asarray(array("q", values)).reshape(-1, len(names))  # numpy itself is slower
    columns = np.ascontiguousarray(table.T)
    return dict(zip(names, columns, strict=True))
