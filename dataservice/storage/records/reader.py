"""Bytes of one record -> `Record`, by compiled decoders where they suffice.

Invariants: `RecordReader.read` gives what `parse_record` gives, the same record or the same error,
for any bytes, in every process: both hand their values to the same code, and a compiled decoder
that stumbles decides nothing. What is in fields that nobody reads is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from dataservice.errors import ImageError, RecordError
from dataservice.storage.records.fields import Names
from dataservice.storage.records.inline import decode_data_uri, is_data_uri
from dataservice.storage.records.layouts import LayoutReader
from dataservice.storage.records.model import MAX_IMAGES, Record, Size, Turn
from dataservice.storage.records.place import Placer
from dataservice.storage.records.sizes import SizeFields
from dataservice.storage.records.values import is_plain, kind, load
from dataservice.storage.sources import RecordFormat

DEFAULT_FORMAT = RecordFormat()

_Part = tuple[str, Sequence[Turn], Sequence[str], Sequence[Size | None], bool]
"""Layout, turns, images, sizes and `keyed` of one document."""


class RecordReader:
    """Reads the records of one source; thread-safe. Raises ConfigError for a format that names an
    unknown layout, field or role."""

    def __init__(self, fmt: RecordFormat = DEFAULT_FORMAT) -> None:
        names = Names(fmt)
        schema = names.schema()
        self._one = msgspec.json.Decoder(schema)
        self._many = msgspec.json.Decoder(list[schema])  # type: ignore[valid-type]
        self._layouts = LayoutReader(names, layout=fmt.layout, data_uris=fmt.data_uris)
        self._placer = Placer(fmt.placeholders, fmt.mismatch)
        self._sizes = SizeFields(names.top)

    def read(self, line: bytes) -> Record:
        """One line without its line end, or one item of an array; raises RecordError."""
        if is_plain(line):
            decoder = self._many if line.startswith(b"[") else self._one
            try:
                value = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError):
                return self.read_exactly(line)
            return self._record(value)
        return self.read_exactly(line)

    def read_exactly(self, line: bytes) -> Record:
        """The same without the compiled decoders."""
        return self._record(load(line))

    def _record(self, value: Any) -> Record:
        if type(value) is list:
            return self._several(value)
        if type(value) is not dict:
            raise RecordError(f"a record must be a JSON object, not {kind(value)}")
        layout, turns, images, sizes, keyed = self._part(value)
        return Record(
            layout=layout,
            turns=tuple(turns),
            images=tuple(images),
            sizes=tuple(sizes),
            keyed=keyed,
        )

    def _part(self, fields: dict[str, Any]) -> _Part:
        layout, draft = self._layouts.read(fields)
        turns, images, order = self._placer.place(draft)
        if not images:
            return layout, turns, (), (), False
        if order is None:
            return layout, turns, images, self._sizes.read(fields, len(images)), draft.keyed
        listed = self._sizes.read(fields, len(draft.listed))
        sizes = [None if i is None else listed[i] for i in order]
        return layout, turns, images, sizes, draft.keyed

    def _several(self, values: list[Any]) -> Record:
        """A list of records is one record of several documents."""
        if not values:
            raise RecordError("a list of records must hold a record, but is empty")
        turns: list[Turn] = []
        images: list[str] = []
        sizes: list[Size | None] = []
        starts: list[int] = []
        layouts: list[str] = []
        keyed = False
        for number, value in enumerate(values):
            where = f"record {number} of a list"
            if type(value) is not dict:
                raise RecordError(f"{where} must be a JSON object, not {kind(value)}")
            try:
                layout, more_turns, more_images, more_sizes, more_keyed = self._part(value)
            except RecordError as error:
                raise RecordError(f"{where}: {error.reason}") from None
            starts.append(len(turns))
            turns += more_turns
            images += more_images
            sizes += more_sizes
            keyed |= more_keyed
            layouts.append(layout)
            if layout != layouts[0]:
                raise RecordError(f"{where} has the layout {layout}, the first has {layouts[0]}")
        if len(images) > MAX_IMAGES:
            raise RecordError(f"{len(images)} images, more than {MAX_IMAGES}")
        return Record(
            layout=layouts[0],
            turns=tuple(turns),
            images=tuple(images),
            starts=tuple(starts),
            sizes=tuple(sizes),
            keyed=keyed,
        )


@lru_cache(maxsize=64)
def reader_of(fmt: RecordFormat) -> RecordReader:
    """A shared one."""
    return RecordReader(fmt)


def parse_record(line: bytes, fmt: RecordFormat = DEFAULT_FORMAT) -> Record:
    """What `RecordReader(fmt).read(line)` gives, by the exact way alone."""
    return reader_of(fmt).read_exactly(line)


def inline_image(line: bytes, fmt: RecordFormat, number: int) -> bytes:
    """The bytes of image `number` of the record, which must stand in it as a data: URI.

    Raises RecordError for a record that cannot be read, ImageError for an image that is none.
    """
    images = reader_of(fmt).read(line).images
    if not 0 <= number < len(images) or not is_data_uri(images[number]):
        raise ImageError(f"image {number} of the record does not stand in it")
    return decode_data_uri(images[number])
