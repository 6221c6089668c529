"""Reads the records of one file as the index does, then their images as a served run does.

Invariants: one finding a record, in their order; a record is good when the index takes it and each
of its images is found, whole and decodable, in the size that the index has of it; memory holds the
records of a batch and what `PictureChecker` holds.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.errors import DataError
from dataservice.linting.findings import Finding
from dataservice.linting.pictures import Fetch, Picture, PictureChecker, Size
from dataservice.storage.archives import Archive, Folder, ImageFinder
from dataservice.storage.archives.names import shown
from dataservice.storage.backends import ObjectStat
from dataservice.storage.counting import RecordCounter
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.image_places import ImagePlace, file_place, inside_place, member_place
from dataservice.storage.index_rows import RowReader, Rows
from dataservice.storage.jsonl import Line
from dataservice.storage.listing import FoundFile
from dataservice.storage.members import read_image
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.reads import ReadShard
from dataservice.storage.recordfiles import RecordScan, packing_of
from dataservice.storage.records import inline_image
from dataservice.storage.sources import SourceFiles

_KEPT_OUTCOMES = 65_536


class _Image(NamedTuple):
    """What tells an image apart in its record file, and what it is called."""

    url: str
    """Of the file that its bytes are in."""
    key: int | str
    """Row of an archive, "" for a plain file; of an image within its record the record's place."""
    name: str
    width: int
    height: int


@dataclass(slots=True)
class RecordLinter:
    """Of one source."""

    files: SourceFiles
    counter: RecordCounter
    store: Store
    reader: ShardReader
    checker: PictureChecker
    deadline_s: float
    _read: ReadShard = field(init=False)
    _known: dict[_Image, str | None] = field(default_factory=dict)
    """Why an image cannot be used, of images seen before."""

    def __post_init__(self) -> None:
        # Always this callable: what is kept of Parquet files belongs to it.
        self._read = self.reader.read

    def lint(self, name: str, file: FoundFile, finder: ImageFinder) -> Iterator[Finding]:
        """Findings of `file`, named `name`. Raises StorageError."""
        shard = _shard(file, packing_of(file.url))
        embedded = EmbeddedImages(self._read, shard) if shard.packing == "parquet" else None
        reader = RowReader(self.files, self.counter, finder, embedded)
        scan = RecordScan(self.store, file.url, file.stat.size_bytes, deadline_s=self.deadline_s)
        for lines in scan.batches():
            rows = reader.read(lines)
            reasons: dict[int, str] = {bad.row: bad.reason for bad in rows.rejected}
            wanted = self._images(lines, rows, shard, finder)
            self._check({image: fetch for images in wanted for image, fetch in images})
            for row, (line, images) in enumerate(zip(lines, wanted, strict=True)):
                reason = reasons.get(row)
                for image, _ in images:
                    reason = reason or self._known[image]
                yield Finding(file=name, kind="jsonl", line=line.number, reason=reason)

    def _images(
        self, lines: list[Line], rows: Rows, shard: ShardRef, finder: ImageFinder
    ) -> list[list[tuple[_Image, Fetch]]]:
        """By record, its images and how to read each."""
        columns = [rows.images[name].tolist() for name in ("archive", "member", "width", "height")]
        images = zip(*columns, strict=True)
        found = []
        for line, count in zip(lines, rows.samples["num_images"].tolist(), strict=True):
            own = []
            for _ in range(count):
                archive, member, width, height = next(images)
                if archive < len(finder.archives):
                    own.append(self._outside(finder, rows, archive, member, width, height))
                else:
                    column = rows.inside[archive - len(finder.archives)]
                    own.append(self._inside(shard, column, line, member, width, height))
            found.append(own)
        return found

    def _outside(
        self,
        finder: ImageFinder,
        rows: Rows,
        number: int,
        member: int,
        width: int,
        height: int,
    ) -> tuple[_Image, Fetch]:
        archive = finder.archives[number]
        if isinstance(archive, Folder):
            found = rows.files[member]
            url = posixpath.join(archive.url, found.name)
            stat = ObjectStat(size_bytes=found.size_bytes, mtime_ns=found.mtime_ns)
            shard = FoundFile(url=url, stat=stat).shard(self.files.name, archive.url)
            spec = _spec(file_place(found.name, found.size_bytes), width, height)
            return _Image(url, "", found.name, width, height), partial(self._fetch, shard, spec)
        assert isinstance(archive, Archive)
        name = archive.name(member)
        spec = _spec(member_place(archive.columns, name, member), width, height)
        image = _Image(archive.file.url, member, name, width, height)
        return image, partial(self._fetch, _shard(archive.file), spec)

    def _inside(
        self, shard: ShardRef, column: str, line: Line, member: int, width: int, height: int
    ) -> tuple[_Image, Fetch]:
        key = f"{line.offset}/{column}/{member}"
        image = _Image(shard.url, key, f"number {member + 1}", width, height)
        if not column:
            data = line.data or b""
            return image, lambda: (
                inline_image(data, self.files.format, member),
                (width, height),
            )
        spec = _spec(inside_place(column, member, line.offset, line.length), width, height)
        return image, partial(self._fetch, shard, spec)

    def _fetch(self, shard: ShardRef, spec: ImageSpec) -> tuple[bytes, Size]:
        return read_image(self._read, spec, shard), (spec.width, spec.height)

    def _check(self, wanted: dict[_Image, Fetch]) -> None:
        """Learns what is not known yet."""
        if len(self._known) > _KEPT_OUTCOMES:
            self._known = {image: self._known[image] for image in wanted if image in self._known}
        new = {image: fetch for image, fetch in wanted.items() if image not in self._known}
        results = self.checker.check(new.values())
        for image, result in zip(new, results, strict=True):
            self._known[image] = _reason(image, result)


def _reason(image: _Image, result: Picture | DataError) -> str | None:
    if isinstance(result, Picture):
        return None
    return f"image {shown(image.name)} in {posixpath.basename(image.url)}: {result.reason}"


def _shard(file: FoundFile, packing: str = "") -> ShardRef:
    return file.shard("", posixpath.basename(file.url), packing)


def _spec(place: ImagePlace, width: int, height: int) -> ImageSpec:
    return ImageSpec(
        shard=0,
        **place._asdict(),
        width=width,
        height=height,
        target_width=width,
        target_height=height,
    )
