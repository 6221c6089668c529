"""The texts of a pack: its records read, rendered and checked against what the index counted.

Invariants: texts come in item order, whatever thread comes first; a record that cannot be had is
a hole of its sample, with as many image tokens as planned and padding else; what the index did not
count so is an error that names the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ItemSpec, PackSpec, ShardRef
from dataservice.core.vision import VisionRules
from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    RecordError,
    StaleIndexError,
    StorageError,
    StorageTimeout,
)
from dataservice.pipeline.pool import DeadlinePool, Job
from dataservice.pipeline.reading import NotAtHand, Reader, at_hand, record_key, undamaged
from dataservice.pipeline.specs import image_tokens
from dataservice.pipeline.text import Rendered, TextRenderer
from dataservice.storage.reads import ReadShard
from dataservice.storage.recordfiles import read_record
from dataservice.storage.records import Record, RecordReader, reader_of
from dataservice.storage.sources import RecordFormat

Text = Rendered | DataServiceError
"""A rendered sample, or why there is none."""


class PackTexts:
    """The text tasks of one pack: `start`, `finish`, and `cancel` at the end in any case."""

    def __init__(
        self,
        spec: PackSpec,
        reader: Reader,
        renderer: TextRenderer,
        formats: Mapping[str, RecordFormat],
        rules: VisionRules,
        pool: DeadlinePool,
        deadline_s: float,
        need: tuple[int, ...],
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._renderer = renderer
        self._formats = formats
        self._rules = rules
        self._pool = pool
        self._deadline_s = deadline_s
        self._need = need
        self._jobs: list[Job[list[Text]]] = []
        self._at_hand: partial[list[Text]] | None = None

    def start(self, holes: Mapping[str, str]) -> None:
        """Where no record has to be waited for, `finish` makes the texts itself. Else deals the
        items to at most as many tasks as there are threads: item i is in task i % count."""
        items = self._spec.items
        if (lines := self._lines_at_hand(holes)) is not None:
            self._at_hand = partial(self._render_all, items, holes, lines)
            return
        count = min(len(items), self._pool.num_threads)
        self._jobs = [
            self._pool.submit(
                partial(self._render_all, items[i::count], holes),
                commit=_as_it_is,
                deadline_s=self._deadline_s,
                priority=self._need,
            )
            for i in range(count)
        ]

    def finish(self, storage_holes: bool) -> tuple[list[Rendered], dict[str, str]]:
        """The texts in item order, and the new holes among them."""
        parts = [] if self._at_hand is None else [self._at_hand()]
        for job in self._jobs:
            try:
                parts.append(self._pool.result(job))
            except DeadlineExceeded as error:
                raise StorageTimeout(
                    f"reading the records of pack {self._spec.pack_id} {error}"
                ) from error
        rendered: list[Rendered] = []
        found: dict[str, str] = {}
        for i, item in enumerate(self._spec.items):
            text = parts[i % len(parts)][i // len(parts)]
            if isinstance(text, DataServiceError):
                if isinstance(text, StorageError) and not storage_holes:
                    raise text
                found[record_key(item.key)] = str(text)
                text = self.blank(item)
            rendered.append(text)
        return rendered, found

    def blank(self, item: ItemSpec) -> Rendered:
        """For a text that cannot be had: its image tokens, as many as planned, then padding."""
        num_image_tokens = sum(image_tokens(image, self._rules) for image in item.kept)
        ids = np.full(item.total_tokens, self._renderer.pad_token, np.int32)
        ids[:num_image_tokens] = self._renderer.image_token
        return Rendered(
            ids=ids,
            loss=np.zeros(item.total_tokens, np.bool_),
            image_docs=(0,) * len(item.images),
        )

    def cancel(self) -> None:
        """Takes back what has not started."""
        self._pool.cancel(self._jobs)

    def _lines_at_hand(self, holes: Mapping[str, str]) -> dict[str, bytes] | None:
        """By sample key; None when one has to be waited for, or is odd in any way."""
        read = at_hand(self._reader)
        lines: dict[str, bytes] = {}
        try:
            for item in self._spec.items:
                shard = self._spec.shards[item.shard]
                if shard.packing:
                    return None
                if item.key not in lines and record_key(item.key) not in holes:
                    lines[item.key] = _record_line(read, item, shard)
        except (NotAtHand, RecordError):
            return None
        return lines

    def _render_all(
        self,
        items: Sequence[ItemSpec],
        holes: Mapping[str, str],
        lines: Mapping[str, bytes] | None = None,
    ) -> list[Text]:
        """Read one by one, unless their `lines` are at hand, and tokenised together. What makes a
        hole of a sample stands in its place; what ends the build is raised."""
        found: dict[int, Text] = {}
        records: dict[int, Record] = {}
        for i, item in enumerate(items):
            if record_key(item.key) in holes:
                found[i] = self.blank(item)
                continue
            try:
                records[i] = self._record(item, None if lines is None else lines[item.key])
            except (RecordError, StorageError) as error:
                found[i] = error
        sizes = [[image_tokens(image, self._rules) for image in items[i].images] for i in records]
        rendered = self._renderer.render_all(list(zip(records.values(), sizes, strict=True)))
        for i, text in zip(records, rendered, strict=True):
            found[i] = self._checked(items[i], text)
        return [found[i] for i in range(len(items))]

    def _record(self, item: ItemSpec, line: bytes | None) -> Record:
        shard = self._spec.shards[item.shard]
        if line is None:
            line = undamaged(self._reader, shard, lambda read: _record_line(read, item, shard))
        try:
            record = self._record_reader(item).read(line)
        except RecordError as error:
            raise _stale(item, shard, f"the record cannot be read: {error.reason}") from error
        if len(record.images) != len(item.images):
            raise _stale(
                item,
                shard,
                f"the record has {len(record.images)} images, the index {len(item.images)}",
            )
        return record

    def _checked(self, item: ItemSpec, text: Rendered | RecordError) -> Rendered:
        """The tokens of the whole sample are those that the index counted."""
        shard = self._spec.shards[item.shard]
        if isinstance(text, RecordError):
            raise _stale(item, shard, text.reason) from text
        if len(text.ids) != item.total_tokens:
            raise _stale(
                item,
                shard,
                f"the record has {len(text.ids)} tokens, the index {item.total_tokens}",
            )
        if item.images and item.stop < item.total_tokens:
            self._check_cut(item, shard, text.ids[: item.stop])
        return text

    def _record_reader(self, item: ItemSpec) -> RecordReader:
        if item.source not in self._formats:
            raise ValueError(f"no record format for the source {item.source} of {item.key}")
        return reader_of(replace(self._formats[item.source], layout=item.layout))

    def _check_cut(self, item: ItemSpec, shard: ShardRef, kept: NDArray[np.int32]) -> None:
        """The tokens before the cut hold the kept images whole, and nothing of another."""
        renderer, number = self._renderer, item.kept_images
        expected = {
            renderer.image_token: sum(image_tokens(image, self._rules) for image in item.kept),
            renderer.image_start: number,
            renderer.image_end: number,
        }
        if any(
            np.count_nonzero(kept == token) != count
            for token, count in expected.items()
            if token is not None
        ):
            raise _stale(
                item, shard, f"the first {item.stop} tokens are not those of {number} whole images"
            )


def _record_line(read: ReadShard, item: ItemSpec, shard: ShardRef) -> bytes:
    line = read_record(read, shard, item.offset, item.length)
    if len(line) != item.length or zlib.crc32(line) != item.crc32:
        raise RecordError(f"damaged record: other bytes than those indexed ({shard.url})")
    return line


def _as_it_is(texts: list[Text]) -> list[Text]:
    return texts


def _stale(item: ItemSpec, shard: ShardRef, what: str) -> StaleIndexError:
    return StaleIndexError(
        f"sample {item.key} in {shard.url}: {what}; "
        "the file or the settings changed, run `dataservice index` again"
    )
