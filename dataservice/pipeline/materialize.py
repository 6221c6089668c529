"""Builds the arrays of one pack from its spec: reads, decodes, renders, masks.

Invariants: the bytes are a function of the spec, the shards' content, the settings and the holes
alone, whatever thread comes first; the layout never depends on whether a picture could be had; a
hole is zeros in the picture's patches and -100 in all labels of its sample; a record that cannot
be had is padding, one document, all its labels -100; a record that is a list of records is as many
documents, side by side; of a sample that is cut off, images beyond the cut are not
read and no image is cut; nothing writes into the arrays after `build_pack` returned. Pictures are
read and decoded largest first.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec, ShardRef
from dataservice.core.vision import VisionRules
from dataservice.errors import (
    ArchiveError,
    DataServiceError,
    DeadlineExceeded,
    ImageError,
    RecordError,
    StaleIndexError,
    StorageError,
    StorageTimeout,
)
from dataservice.pipeline.documents import (
    document_keys,
    documents_of,
    image_doc_ids,
    text_arrays,
)
from dataservice.pipeline.images import DecodeLimits, decode_pixels, patchify
from dataservice.pipeline.pool import BuildPools, Job
from dataservice.pipeline.specs import check_spec, grid, image_tokens, num_patches
from dataservice.pipeline.text import Rendered, TextRenderer
from dataservice.storage.members import read_image
from dataservice.storage.reads import ReadShard
from dataservice.storage.recordfiles import read_record
from dataservice.storage.records import RecordReader, reader_of
from dataservice.storage.sources import RecordFormat

S = TypeVar("S")
T = TypeVar("T")

Text = Rendered | DataServiceError
"""A rendered sample, or why there is none."""


class Reader(Protocol):
    """`storage.objects.ShardReader`, or a fake."""

    def read(self, shard: ShardRef, offset: int, size: int) -> bytes: ...

    @property
    def used_copies(self) -> bool: ...

    def read_origin(self, shard: ShardRef, offset: int, size: int) -> bytes: ...

    def drop_copy(self, shard: ShardRef) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPack:
    """T = pack length, D = documents, N = images, P = patches, F = 3 * patch * patch.

    arrays: input_ids int32 [T]; labels int32 [T], unshifted, -100 where there is no loss;
    cu_seqlens int32 [D + 1], padding is its own last segment; pixel_values uint8 [P, F];
    image_grid_thw int32 [N, 3] in patches; image_doc_ids int32 [N].
    """

    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]
    """pack_id, sample_keys (one a document: ItemSpec.piece_key, or in the same form the part of the
    sample that the document is), num_docs (padding not counted), holes ("<hole key>: <reason>")."""
    new_holes: dict[str, str]
    """Hole key to reason and place, of the holes that were not known before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Picture:
    key: str
    """Hole key: "<sample key>#<number of the image in the sample>"."""
    item: int
    spec: ImageSpec
    patches: slice


class _Cancelled(Exception):
    """The build that wanted this picture has failed already."""


def hole_key(sample_key: str, image: int) -> str:
    return f"{sample_key}#{image}"


def record_key(sample_key: str) -> str:
    """Hole key of a sample whose record itself cannot be had."""
    return f"{sample_key}#record"


def build_pack(
    spec: PackSpec,
    *,
    reader: Reader,
    renderer: TextRenderer,
    formats: Mapping[str, RecordFormat],
    rules: VisionRules,
    holes: Mapping[str, str],
    storage_holes: bool,
    limits: DecodeLimits,
    pool: BuildPools,
) -> BuiltPack:
    """Builds the pack; safe to call from several threads with one pool.

    `formats` are those of the records, by source; the layout is the one that the index recognised.
    `holes` are the known ones: they are not read. A damaged picture or record, or a picture that
    takes too long to decode, becomes a new hole; one whose read fails only with `storage_holes`.

    Raises StaleIndexError when a shard or a setting is not what the index saw, StorageError
    (StorageTimeout) when a read fails in a way that may pass, ValueError for a spec that
    contradicts itself.
    """
    check_spec(spec, rules)
    pictures = _pictures(spec, rules)
    pixels = np.zeros((spec.num_patches, 3 * rules.patch * rules.patch), np.uint8)
    build = _Build(spec, reader, renderer, formats, rules, limits, pool)
    try:
        build.start_pictures([p for p in pictures if p.key not in holes], pixels)
        texts = build.start_texts(holes)
        rendered, new_holes = build.finish_texts(texts, storage_holes)
        new_holes |= build.finish_pictures(storage_holes)
    finally:
        build.cancel()
    all_holes = {**holes, **new_holes}
    lost = [p for p in pictures if p.key in all_holes]
    for picture in lost:  # a sample may stand in a pack twice, and fail once
        pixels[picture.patches] = 0
    blank = [i for i, item in enumerate(spec.items) if record_key(item.key) in all_holes]
    for i in blank:
        rendered[i] = build.blank(spec.items[i])
    masked = {p.item for p in lost} | set(blank)
    documents = documents_of(spec, rendered)
    arrays = text_arrays(spec, rendered, documents, renderer.pad_token, masked)
    arrays["pixel_values"] = pixels
    arrays["image_grid_thw"] = np.array(
        [[1, *grid(p.spec, rules)] for p in pictures], np.int32
    ).reshape(-1, 3)
    arrays["image_doc_ids"] = image_doc_ids(spec, rendered, documents)
    meta = {
        "pack_id": spec.pack_id,
        "sample_keys": document_keys(spec, documents),
        "num_docs": sum(map(len, documents)),
        "holes": [
            f"{key}: {all_holes[key]}"
            for key in dict.fromkeys(
                [record_key(spec.items[i].key) for i in blank] + [p.key for p in lost]
            )
        ],
    }
    return BuiltPack(arrays=arrays, meta=meta, new_holes=new_holes)


class _Build:
    """The tasks of one pack in the pools."""

    def __init__(
        self,
        spec: PackSpec,
        reader: Reader,
        renderer: TextRenderer,
        formats: Mapping[str, RecordFormat],
        rules: VisionRules,
        limits: DecodeLimits,
        pool: BuildPools,
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._renderer = renderer
        self._formats = formats
        self._rules = rules
        self._limits = limits
        self._pool = pool
        self._cancelled = False
        self._reads: list[Job[Any]] = []
        self._decodes: list[Job[Any]] = []
        self._waiting: list[tuple[_Picture, Job[Job[None]]]] = []

    def start_texts(self, holes: Mapping[str, str]) -> list[Job[list[Text]]]:
        """Deals the items to as many tasks as there are threads: item i is in task i % count."""
        items, count = self._spec.items, self._pool.reads.num_threads
        return [
            self._read(partial(self._render_all, items[i::count], holes), commit=_as_it_is)
            for i in range(min(count, len(items)))
        ]

    def finish_texts(
        self, jobs: list[Job[list[Text]]], storage_holes: bool
    ) -> tuple[list[Rendered], dict[str, str]]:
        """The texts in item order, and the new holes among them."""
        parts = []
        for job in jobs:
            try:
                parts.append(self._pool.reads.result(job))
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

    def start_pictures(self, pictures: list[_Picture], pixels: NDArray[np.uint8]) -> None:
        for picture in sorted(pictures, key=lambda p: -p.spec.width * p.spec.height):
            job = self._read(
                partial(self._read_image, picture.spec),
                commit=partial(self._start_decode, picture.spec, pixels[picture.patches]),
            )
            self._waiting.append((picture, job))

    def finish_pictures(self, storage_holes: bool) -> dict[str, str]:
        """The new holes."""
        found: dict[str, str] = {}
        for picture, job in self._waiting:
            try:
                self._finish_picture(picture, job)
            except (ArchiveError, ImageError) as error:
                found[picture.key] = f"{error.reason} ({self._place(picture)})"
            except StorageError as error:
                if not storage_holes:
                    raise
                found[picture.key] = f"could not be read: {error} ({self._place(picture)})"
        return found

    def _place(self, picture: _Picture) -> str:
        shard = self._spec.shards[picture.spec.shard]
        return f"{picture.spec.member} in {shard.source}/{shard.name}"

    def cancel(self) -> None:
        """Takes back what has not started; finished builds have nothing left to take back."""
        self._cancelled = True
        self._pool.reads.cancel(self._reads)
        self._pool.decodes.cancel(self._decodes)

    def _read(self, compute: Callable[[], S], commit: Callable[[S], T]) -> Job[T]:
        job = self._pool.reads.submit(
            compute, commit=commit, deadline_s=self._limits.read_deadline_s
        )
        self._reads.append(job)
        return job

    def _start_decode(self, image: ImageSpec, out: NDArray[np.uint8], data: bytes) -> Job[None]:
        """Runs as the commit of the read, so a read that was given up starts no decode."""
        if self._cancelled:
            raise _Cancelled
        job = self._pool.decodes.submit(
            partial(decode_pixels, data, image, self._limits),
            commit=lambda pixels: patchify(pixels, self._rules, out),
            deadline_s=self._limits.deadline_s,
        )
        self._decodes.append(job)
        return job

    def _finish_picture(self, picture: _Picture, job: Job[Job[None]]) -> None:
        try:
            decode = self._pool.reads.result(job)
        except DeadlineExceeded as error:
            raise StorageTimeout(f"reading {self._place(picture)} {error}") from error
        try:
            self._pool.decodes.result(decode)
        except DeadlineExceeded as error:
            raise ImageError(f"decode {error}") from error

    def _read_image(self, image: ImageSpec) -> bytes:
        shard = self._spec.shards[image.shard]
        fmt = self._formats.get(shard.source)
        return self._undamaged(shard, lambda read: read_image(read, image, shard, fmt))

    def _undamaged(self, shard: ShardRef, get: Callable[[ReadShard], bytes]) -> bytes:
        """What `get` reads; when a staged copy turns out damaged, the origin decides."""
        try:
            return get(self._reader.read)
        except (ArchiveError, RecordError):
            if not self._reader.used_copies:
                raise
            data = get(self._reader.read_origin)
        self._reader.drop_copy(shard)
        return data

    def _render_all(self, items: Sequence[ItemSpec], holes: Mapping[str, str]) -> list[Text]:
        """What makes a hole of a sample stands in its place; what ends the build is raised."""
        found: list[Text] = []
        for item in items:
            if record_key(item.key) in holes:
                found.append(self.blank(item))
                continue
            try:
                found.append(self._render(item))
            except (RecordError, StorageError) as error:
                found.append(error)
        return found

    def _render(self, item: ItemSpec) -> Rendered:
        """The tokens of the whole sample, checked against what the index counted."""
        shard = self._spec.shards[item.shard]
        line = self._undamaged(shard, lambda read: _record_line(read, item, shard))
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
        sizes = [image_tokens(image, self._rules) for image in item.images]
        try:
            rendered = self._renderer.render(record, sizes)
        except RecordError as error:
            raise _stale(item, shard, error.reason) from error
        if len(rendered.ids) != item.total_tokens:
            raise _stale(
                item,
                shard,
                f"the record has {len(rendered.ids)} tokens, the index {item.total_tokens}",
            )
        if item.images and item.stop < item.total_tokens:
            self._check_cut(item, shard, rendered.ids[: item.stop])
        return rendered

    def _record_reader(self, item: ItemSpec) -> RecordReader:
        if item.source not in self._formats:
            raise ValueError(f"no record format for the source {item.source} of {item.key}")
        return reader_of(replace(self._formats[item.source], layout=item.layout))

    def _check_cut(self, item: ItemSpec, shard: ShardRef, kept: NDArray[np.int32]) -> None:
        """The tokens before the cut hold the kept images whole, and nothing of another."""
        renderer, number = self._renderer, item.kept_images
        expected = {
            renderer.image_start: number,
            renderer.image_token: sum(image_tokens(image, self._rules) for image in item.kept),
            renderer.image_end: number,
        }
        if any(np.count_nonzero(kept == token) != count for token, count in expected.items()):
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


def _pictures(spec: PackSpec, rules: VisionRules) -> list[_Picture]:
    """Those that are kept, in pack order, each with its place in the pixel array."""
    pictures, start = [], 0
    for number, item in enumerate(spec.items):
        for i, image in enumerate(item.kept):
            stop = start + num_patches(image, rules)
            key = hole_key(item.key, i)
            pictures.append(_Picture(key=key, item=number, spec=image, patches=slice(start, stop)))
            start = stop
    return pictures
