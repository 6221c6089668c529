"""Where the images of records are, and how to read each.

Invariants: images of a record come in the order of its text; two images with the same identity have
the same bytes.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dataservice.core.packspec import ImageSpec, ShardRef
from dataservice.linting.pictures import Size
from dataservice.storage.archives import Archive, Folder, ImageFinder
from dataservice.storage.backends import ObjectStat
from dataservice.storage.image_places import ImagePlace, file_place, inside_place, member_place
from dataservice.storage.index_rows import Rows
from dataservice.storage.jsonl import Line
from dataservice.storage.listing import FoundFile
from dataservice.storage.members import read_image
from dataservice.storage.reads import ReadShard
from dataservice.storage.records import inline_image
from dataservice.storage.sources import SourceFiles


class Identity(NamedTuple):
    """What tells an image apart in its record file, and what it is called."""

    url: str
    """Of the file that its bytes are in."""
    key: int | str
    """Row of an archive, "" for a plain file; of an image within its record the record's place."""
    name: str
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedImage:
    identity: Identity
    spec: ImageSpec
    """With shard 0, and no size but the picture's own."""
    fetch: Callable[[], tuple[bytes, Size | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLocator:
    """Of the record files of one source."""

    files: SourceFiles
    read: ReadShard
    """Always this callable: what is kept of Parquet files belongs to it."""

    def locate(
        self, lines: Sequence[Line], rows: Rows, shard: ShardRef, finder: ImageFinder
    ) -> list[list[LocatedImage]]:
        """By record of `lines`, of the record file `shard`, which `rows` were read from."""
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
    ) -> LocatedImage:
        archive = finder.archives[number]
        if isinstance(archive, Folder):
            found = rows.files[member]
            url = posixpath.join(archive.url, found.name)
            stat = ObjectStat(size_bytes=found.size_bytes, mtime_ns=found.mtime_ns)
            shard = FoundFile(url=url, stat=stat).shard(self.files.name, archive.url)
            spec = _spec(file_place(found.name, found.size_bytes), width, height)
            identity = Identity(url, "", found.name, width, height)
        else:
            assert isinstance(archive, Archive)
            name = archive.name(member)
            spec = _spec(member_place(archive.columns, name, member), width, height)
            identity = Identity(archive.file.url, member, name, width, height)
            shard = shard_of(archive.file)
        return LocatedImage(identity=identity, spec=spec, fetch=partial(self._fetch, shard, spec))

    def _inside(
        self, shard: ShardRef, column: str, line: Line, member: int, width: int, height: int
    ) -> LocatedImage:
        key = f"{line.offset}/{column}/{member}"
        identity = Identity(shard.url, key, f"number {member + 1}", width, height)
        spec = _spec(inside_place(column, member, line.offset, line.length), width, height)
        if column:
            fetch = partial(self._fetch, shard, spec)
        else:
            fetch = partial(self._from_record, line.data or b"", member, (width, height))
        return LocatedImage(identity=identity, spec=spec, fetch=fetch)

    def _fetch(self, shard: ShardRef, spec: ImageSpec) -> tuple[bytes, Size | None]:
        return read_image(self.read, spec, shard), (spec.width, spec.height)

    def _from_record(self, data: bytes, member: int, size: Size) -> tuple[bytes, Size | None]:
        return inline_image(data, self.files.format, member), size


def shard_of(file: FoundFile, packing: str = "") -> ShardRef:
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
