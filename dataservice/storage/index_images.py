"""The images of some records: where each is and how large, looked up together.

Invariants: a name is looked up once, and a header read where a record gives no size; a size that a
record gives is believed, building its pack checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataservice.errors import DataError, RecordError, StorageError
from dataservice.storage.archives import ImageFinder, MissingImage, Place
from dataservice.storage.archives.names import shown
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.jsonl import Line
from dataservice.storage.probe import probe
from dataservice.storage.records import Record, Size, decode_data_uri, is_data_uri

_SUFFIXES = (".jpg", ".png", ".webp")
"""Of an image that is called by its record's key: the first is in its name."""

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
        unsized: dict[str, bool] = {}
        """By name: whether its header is needed."""
        keyed: set[str] = set()
        for record in records:
            if isinstance(record, Record):
                if record.keyed:
                    keyed.update(record.images)
                for number, name in enumerate(record.images):
                    if name[:5] == "data:" or (embedded is not None and name in embedded):
                        continue
                    is_unsized = record.sizes[number] is None
                    if is_unsized or name not in unsized:
                        unsized[name] = is_unsized
        self._clear: dict[str, Place] = {}
        """By name, of members of archives without a problem."""
        self._others: dict[str, Place | DataError | StorageError] = {}
        probed: dict[str, Place] = {}
        whole = finder.whole
        found = dict(zip(unsized, finder.places(list(unsized)), strict=True))
        self._renamed: dict[str, str] = {}
        """Of images called by a key that are there with another suffix: that name."""
        for suffix in _SUFFIXES[1:]:
            self._rename(keyed, suffix, found, unsized)
        for name, place in found.items():
            is_unsized = unsized[name]
            if not isinstance(place, Place):
                self._others[name] = place
                continue
            if is_unsized:
                probed[name] = place
            if place.stat is None and (place.archive in whole or finder.problem(place) is None):
                self._clear[name] = place
            else:
                self._others[name] = place
        self._sizes = dict(zip(probed, finder.sizes(list(probed.values())), strict=True))

    def _rename(
        self,
        keyed: set[str],
        suffix: str,
        found: dict[str, Place | DataError | StorageError],
        unsized: dict[str, bool],
    ) -> None:
        """Looks for those of them that are missing still."""
        others = {
            name: name.removesuffix(_SUFFIXES[0]) + suffix
            for name in keyed
            if name not in self._renamed and isinstance(found.get(name), MissingImage)
        }
        places = self._finder.places(list(others.values())) if others else []
        for (name, other), place in zip(others.items(), places, strict=True):
            if not isinstance(place, MissingImage):
                self._renamed[name] = other
                found[other] = place
                unsized[other] = unsized[name] or unsized.get(other, False)

    def images_of(self, row: int, record: Record) -> list[int]:
        """Of each image archive, member, width, height and probed, as the columns of these names;
        those of an image stand together.

        Raises DataError.
        """
        clear = self._clear
        found: list[int] = []
        for number, name in enumerate(record.images):
            given = record.sizes[number]
            size: _Answer
            if record.keyed:
                name = self._renamed.get(name, name)
            if place := clear.get(name):
                archive, member = place.archive, place.member
                size = given or self._sizes[name]
            elif self._is_inside(name):
                archive, member, size = self._inside(row, number, name, given)
            else:
                archive, member, size = self._outside(name, given)
            if not isinstance(size, tuple):
                raise self._failed(name, size, keyed=record.keyed)
            found += (archive, member, *size, given is None)
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
        place = self._others[name]
        if not isinstance(place, Place):
            return -1, -1, place
        size: _Answer | None = self._finder.problem(place) or given if given else None
        member = place.member if place.stat is None else self._file_number(place)
        return place.archive, member, size or self._sizes[name]

    def _failed(self, name: str, error: DataError | StorageError, *, keyed: bool) -> DataError:
        if isinstance(error, StorageError):
            self.again = True
            return RecordError(f"image {shown(name)} could not be read: {error}")
        if isinstance(error, RecordError):
            is_missing = isinstance(error, MissingImage)
            self.again |= is_missing and self._finder.has_folders
            if is_missing and keyed:
                others = " or ".join(_SUFFIXES[1:])
                return RecordError(f"{error.reason}; nor is it there as {others}")
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
