"""One record looked at from end to end: found, read, counted, its images decoded.

Invariants: what is said is what the index would say now, whether there is one or not; nothing is
written; a record that is bad is described as far as it goes, with the reason. A record is found by
reading its file from the front.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.config import Config
from dataservice.core.cost import SampleMeasures, measure, sample_cost
from dataservice.core.packspec import ImageSpec
from dataservice.core.settings import PlanSettings
from dataservice.core.tables import SampleColumns
from dataservice.errors import ArchiveError, ConfigError, DataError
from dataservice.linting.located import ImageLocator, LocatedImage, shard_of
from dataservice.linting.pictures import Picture, PictureChecker
from dataservice.linting.places import Places
from dataservice.pipeline.decoding import DecodeLimits
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.archives import Archive
from dataservice.storage.embedded import EmbeddedImages
from dataservice.storage.index_rows import RowReader, Rows
from dataservice.storage.jsonl import Line
from dataservice.storage.listing import FoundFile, SourceListing, list_source, name_below
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.recordfiles import RecordScan, packing_of
from dataservice.storage.records import Record, RecordReader
from dataservice.storage.sources import SourceFiles

_KEY = re.compile(r"(?P<file>.+)@(?P<offset>\d+)(\[\d+:\d+\])?(#\w+)?")
_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What was asked for: a record by offset or by line, or a whole file where both are None."""

    file: str
    offset: int | None = None
    line: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedImage:
    named: str
    """As the record says."""
    file: str
    """That its bytes are in."""
    spec: ImageSpec
    reason: str | None
    """Why it cannot be decoded; None when it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedRecord:
    source: str
    file: str
    key: str
    line: Line
    record: Record | None
    """None where it cannot be read."""
    reason: str | None
    """Why it, or an image of it, cannot be used; None when all is well."""
    measures: SampleMeasures | None
    """Of this one sample, in arrays of one value; None where the record cannot be used."""
    cost: int
    num_docs: int
    images: tuple[InspectedImage, ...]


def place_of(what: str) -> Place:
    """Reads "SOURCE/FILE@OFFSET", with "[A:B]" or "#IMAGE" or not, "FILE:LINE" or "FILE"."""
    if match := _KEY.fullmatch(what):
        return Place(file=match["file"], offset=int(match["offset"]))
    if match := _LINE.fullmatch(what):
        return Place(file=match["file"], line=int(match["line"]))
    return Place(file=what)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFile:
    """One of a source's."""

    source: SourceFiles
    name: str
    file: FoundFile
    beside: tuple[FoundFile, ...]
    roots: tuple[FoundFile, ...]


class Inspector:
    """Of the sources of a config. Close it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._owned = ExitStack()
        deadline_s = config.staging.deadline_s
        self._deadline_s = deadline_s
        self._store = self._owned.enter_context(closing(Store()))
        self._places = self._owned.enter_context(
            closing(Places(self._store, None, deadline_s=deadline_s))
        )
        self._reader = ShardReader(None, deadline_s=deadline_s, store=self._store)
        self.counter = TextRenderer.build(config.text)

    def close(self) -> None:
        self._owned.close()

    def find(self, name: str) -> RecordFile:
        """The record file of that URL, path, or SOURCE/NAME; ConfigError for none or several."""
        found = [
            RecordFile(
                source=listing.files,
                name=own,
                file=file,
                beside=beside,
                roots=listing.roots,
            )
            for listing in self._listings()
            for file, beside in zip(listing.records, listing.beside, strict=True)
            for own in [name_below(listing.root, file.url)]
            if name in (file.url, f"{listing.files.name}/{own}", own)
            or os.path.abspath(name) == file.url
        ]
        if not found:
            raise ConfigError(
                f"{name}: no source has such a record file; give SOURCE/FILE@OFFSET as "
                "`dataservice plan` prints it, FILE:LINE as `dataservice lint` does, or a FILE, "
                "which may be an archive of images"
            )
        if len(found) > 1:
            named = ", ".join(f"{of.source.name}/{of.name}" for of in found)
            raise ConfigError(f"{name}: several sources have it; say which: {named}")
        return found[0]

    def find_archive(self, name: str) -> FoundFile | None:
        """The zip or tar of images, of any source, of that URL, path or base name; ConfigError for
        several."""
        found = {
            file.url: file
            for listing in self._listings()
            for file in (*listing.roots, *(of for beside in listing.beside for of in beside))
            if not file.stat.is_folder
            if name in (file.url, posixpath.basename(file.url)) or os.path.abspath(name) == file.url
        }
        if len(found) > 1:
            raise ConfigError(f"{name}: several archives; say which: {', '.join(found)}")
        return next(iter(found.values()), None)

    def archive(self, file: FoundFile) -> Archive | ArchiveError:
        """Opened: its directory is read, no member is."""
        step = self._places.beside(file)
        assert isinstance(step, Archive | ArchiveError)
        return step

    def record(self, where: RecordFile, place: Place) -> InspectedRecord:
        """ConfigError where no record begins at the offset, or is on the line."""
        for lines in self.batches(where):
            for line in lines:
                if line.offset == place.offset or line.number == place.line:
                    return self._inspected(where, line)
        asked = f"on line {place.line}" if place.offset is None else f"at offset {place.offset}"
        raise ConfigError(
            f"{where.file.url}: there is no record {asked}; `dataservice plan` and `dataservice "
            "lint` print those that there are"
        )

    def batches(self, where: RecordFile) -> Iterator[list[Line]]:
        size_bytes = where.file.stat.size_bytes
        scan = RecordScan(self._store, where.file.url, size_bytes, deadline_s=self._deadline_s)
        yield from scan.batches()

    def rows(
        self, where: RecordFile, lines: Sequence[Line]
    ) -> tuple[Rows, list[list[LocatedImage]]]:
        """As the index has them, and by record where its images are."""
        finder = self._places.finder(where.source, where.beside, where.roots)
        shard = shard_of(where.file, packing_of(where.file.url))
        locator = ImageLocator(files=where.source, read=self._reader.read)
        embedded = EmbeddedImages(locator.read, shard) if shard.packing == "parquet" else None
        rows = RowReader(where.source, self.counter, finder, embedded).read(lines)
        return rows, locator.locate(lines, rows, shard, finder)

    def _listings(self) -> Iterator[SourceListing]:
        for source in self._config.sources:
            yield list_source(
                source, self._store, deadline_s=self._deadline_s, leave_out=self._config.index_dir
            )

    def _inspected(self, where: RecordFile, line: Line) -> InspectedRecord:
        rows, (located,) = self.rows(where, [line])
        record: Record | None = None
        if line.data is not None:
            try:
                record = RecordReader(where.source.format).read(line.data)
            except DataError:  # whose reason is that of the row
                record = None
        # of a record that cannot be used, the index has no image
        named = record.images if record is not None and located else ()
        images = tuple(self._checked(named, located))
        reasons = [bad.reason for bad in rows.rejected]
        reasons += [f"image {i}: {of.reason}" for i, of in enumerate(images) if of.reason]
        plan = self._config.plan
        measures = None if rows.rejected else measure(columns_of(rows), rules=plan.vision)
        return InspectedRecord(
            source=where.source.name,
            file=where.file.url,
            key=f"{where.source.name}/{where.name}@{line.offset}",
            line=line,
            record=record,
            reason=reasons[0] if reasons else None,
            measures=measures,
            cost=0 if measures is None else int(costs(measures, plan)[0]),
            num_docs=int(rows.samples["num_docs"][0]),
            images=images,
        )

    def _checked(
        self, named: Sequence[str], located: Sequence[LocatedImage]
    ) -> Iterator[InspectedImage]:
        workers = self._config.workers
        limits = DecodeLimits(
            deadline_s=workers.decode_deadline_s,
            max_pixels=workers.max_image_pixels,
            max_bytes=workers.max_image_bytes,
        )
        rules = self._config.plan.vision
        with closing(PictureChecker(digest=False, rules=rules, limits=limits)) as checker:
            results = checker.check(image.fetch for image in located)
            for name, image, result in zip(named, located, results, strict=True):
                yield InspectedImage(
                    named=name,
                    file=image.identity.url,
                    spec=image.spec,
                    reason=None if isinstance(result, Picture) else result.reason,
                )


def columns_of(rows: Rows) -> SampleColumns:
    """As the plan asks an index for them."""
    samples, images = rows.samples, rows.images
    offsets = np.zeros(rows.num_rows + 1, dtype=np.int64)
    np.cumsum(samples["num_images"], out=offsets[1:])
    return SampleColumns(
        text_tokens=samples["text_tokens"],
        loss_tokens=samples["loss_tokens"],
        image_offsets=offsets,
        num_docs=samples["num_docs"],
        **{name: images[name] for name in ("width", "height", "text_before", "markup")},
    )


def costs(measures: SampleMeasures, plan: PlanSettings) -> NDArray[np.int64]:
    """int64 [N]: of whole samples, by the plan's cost model."""
    return sample_cost(
        plan.cost,
        num_patches=measures.num_patches,
        patches_squared=measures.patches_squared,
        image_tokens=measures.image_tokens,
        length=measures.length,
        p_ref=plan.p_ref,
        fitted=plan.fitted,
    )
