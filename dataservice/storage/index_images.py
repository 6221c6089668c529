"""The images of some records: where each is and how large, looked up together.

Invariants: a name is looked up once, and a header read where a record gives no size; a size that a
record gives is believed, building its pack checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from dataservice.errors import DataError, RecordError, StorageError
from dataservice.storage.archives import ImageFinder, MissingImage, Place
from dataservice.storage.archives.names import shown
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.jsonl import Line
from dataservice.storage.probe import probe
from dataservice.storage.records import Record, Size, decode_data_uri, is_data_uri

_Answer = Size | DataError | StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFile:
    """A file of an image folder, as it was when it was looked at."""

    archive: int
    """Number of the folder in `ImageFinder.archives`."""
    name: str
    """Below the folder."""
    size_bytes: int
    mtime_ns: int


class RecordImages:
    """`images_of` the records that were read from `lines`."""

    def __init__(
        self,
        finder: ImageFinder,
        embedded: EmbeddedImages | None,
        lines: Sequence[Line],
        records: Sequence[Record | DataError],
    ) -> None:
        self._finder = finder
        self._embedded = embedded
        self._lines = lines
        self.files: list[FolderFile] = []
        """Those of folders that were used, each once."""
        self.inside: list[str] = []
        """Used places in the record file itself, see `index_rows.Rows.inside`."""
        self.again = False
        self._file_numbers: dict[tuple[int, str], int] = {}
        names: dict[str, bool] = {}  # by name, whether its header is needed
        for record in records:
            if isinstance(record, DataError) or not record.images:
                continue
            for name, size in zip(record.images, record.sizes or repeat(None), strict=False):
                if name[:5] == "data:" or (embedded is not None and name in embedded):
                    continue
                if size is None or name not in names:
                    names[name] = size is None
        self._places = dict(zip(names, finder.places(list(names)), strict=True))
        unsized: dict[str, Place] = {}
        self._clear: dict[str, tuple[int, int]] = {}  # of archives' members without problem
        whole = finder.whole
        for name, place in self._places.items():
            if isinstance(place, Place):
                archive, member, _, stat = place
                if names[name]:
                    unsized[name] = place
                if stat is None and (archive in whole or finder.problem(place) is None):
                    self._clear[name] = archive, member
        self._sizes = dict(zip(unsized, finder.sizes(list(unsized.values())), strict=True))

    def images_of(self, row: int, record: Record) -> list[tuple[int, int, int, int, int]]:
        """(archive, member, width, height, probed) by image, as the columns of the same names.

        Raises DataError.
        """
        sizes, clear = record.sizes, self._clear
        found = []
        for number, name in enumerate(record.images):
            given = sizes[number] if sizes else None
            if name in clear:
                archive, member = clear[name]
                size: _Answer = given or self._sizes[name]
            elif self._is_inside(name):
                archive, member, size = self._inside(row, number, name, given)
            else:
                archive, member, size = self._outside(name, given)
            if not isinstance(size, tuple):
                raise self._failed(name, size)
            found.append((archive, member, size[0], size[1], int(given is None)))
        return found

    def _is_inside(self, name: str) -> bool:
        return name.startswith("data:") or (self._embedded is not None and name in self._embedded)

    def _inside(
        self, row: int, number: int, name: str, given: Size | None
    ) -> tuple[int, int, _Answer]:
        if is_data_uri(name):
            return self._number_inside(""), number, given or _header_of(name)
        assert self._embedded is not None
        column, place = self._embedded.split(name)
        size = given or self._embedded.size(self._lines[row].offset, name)
        return self._number_inside(column), place, size

    def _outside(self, name: str, given: Size | None) -> tuple[int, int, _Answer]:
        place = self._places[name]
        if not isinstance(place, Place):
            return -1, -1, place
        size: _Answer | None = self._finder.problem(place) or given if given else None
        member = place.member if place.stat is None else self._file_number(place)
        return place.archive, member, size or self._sizes[name]

    def _failed(self, name: str, error: DataError | StorageError) -> DataError:
        if isinstance(error, StorageError):
            self.again = True
            return RecordError(f"image {shown(name)} could not be read: {error}")
        if isinstance(error, RecordError):
            self.again |= isinstance(error, MissingImage) and self._finder.has_folders
            return error
        return RecordError(f"image {shown(name)}: {error}")

    def _file_number(self, place: Place) -> int:
        key = place.archive, place.name
        if key not in self._file_numbers:
            assert place.stat is not None
            self._file_numbers[key] = len(self.files)
            self.files.append(
                FolderFile(
                    archive=place.archive,
                    name=place.name,
                    size_bytes=place.stat.size_bytes,
                    mtime_ns=place.stat.mtime_ns,
                )
            )
        return self._file_numbers[key]

    def _number_inside(self, column: str) -> int:
        if column not in self.inside:
            self.inside.append(column)
        return len(self._finder.archives) + self.inside.index(column)


def _header_of(uri: str) -> Size | DataError:
    try:
        data = decode_data_uri(uri)
        header = probe(lambda offset, size: data[offset : offset + size], len(data))
    except DataError as error:
        return error
    return header.width, header.height
