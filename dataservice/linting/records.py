"""Reads the records of one file as the index does, then their images as a served run does.

Invariants: one finding a record, in their order; a record is good when the index takes it and each
of its images is found, whole and decodable, in the size that the index has of it; memory holds the
records of a batch and what `PictureChecker` holds.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dataservice.errors import DataError
from dataservice.linting.findings import Finding
from dataservice.linting.located import Identity, ImageLocator, LocatedImage, shard_of
from dataservice.linting.pictures import Picture, PictureChecker
from dataservice.storage.archives import ImageFinder
from dataservice.storage.archives.names import shown
from dataservice.storage.counting import RecordCounter
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.index_rows import RowReader
from dataservice.storage.listing import FoundFile
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.recordfiles import RecordScan, packing_of
from dataservice.storage.sources import SourceFiles

_KEPT_OUTCOMES = 65_536


@dataclass(slots=True)
class RecordLinter:
    """Of one source."""

    files: SourceFiles
    counter: RecordCounter
    store: Store
    reader: ShardReader
    checker: PictureChecker
    deadline_s: float
    _locator: ImageLocator = field(init=False)
    _known: dict[Identity, str | None] = field(default_factory=dict)
    """Why an image cannot be used, of images seen before."""

    def __post_init__(self) -> None:
        self._locator = ImageLocator(files=self.files, read=self.reader.read)

    def lint(
        self,
        name: str,
        file: FoundFile,
        finder: ImageFinder,
        reached: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Finding]:
        """Findings of `file`, named `name`; `reached` is told how many bytes of its content lie
        behind. Raises StorageError."""
        shard = shard_of(file, packing_of(file.url))
        embedded = EmbeddedImages(self._locator.read, shard) if shard.packing == "parquet" else None
        reader = RowReader(self.files, self.counter, finder, embedded)
        scan = RecordScan(self.store, file.url, file.stat.size_bytes, deadline_s=self.deadline_s)
        for lines in scan.batches():
            rows = reader.read(lines)
            reasons: dict[int, str] = {bad.row: bad.reason for bad in rows.rejected}
            wanted = self._locator.locate(lines, rows, shard, finder)
            self._check({image.identity: image for images in wanted for image in images})
            for row, (line, images) in enumerate(zip(lines, wanted, strict=True)):
                reason = reasons.get(row)
                for image in images:
                    reason = reason or self._known[image.identity]
                yield Finding(file=name, kind="jsonl", line=line.number, reason=reason)
            reached(lines[-1].offset + lines[-1].length)

    def _check(self, wanted: dict[Identity, LocatedImage]) -> None:
        """Learns what is not known yet."""
        if len(self._known) > _KEPT_OUTCOMES:
            self._known = {image: self._known[image] for image in wanted if image in self._known}
        new = {key: image.fetch for key, image in wanted.items() if key not in self._known}
        results = self.checker.check(new.values())
        for image, result in zip(new, results, strict=True):
            self._known[image] = _reason(image, result)


def _reason(image: Identity, result: Picture | DataError) -> str | None:
    if isinstance(result, Picture):
        return None
    return f"image {shown(image.name)} in {posixpath.basename(image.url)}: {result.reason}"
