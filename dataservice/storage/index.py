"""The index as the plan and the workers' specs need it, over memory-mapped tables.

Invariants: opening reads the manifest only, a shard's tables are mapped at its first use, and a
call costs only the rows it is asked for; nothing is as long as the data but the mapped files. The
object may be read by many threads. Resolving a pack of ten items takes about 0.1 ms.
"""

from __future__ import annotations

import bisect
import os
import posixpath
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec, ShardRef
from dataservice.core.tables import SampleColumns, SourceStats, WindowPlan
from dataservice.core.vision import VisionRules, target_size
from dataservice.storage.listing import name_below
from dataservice.storage.manifest import (
    ArchiveEntry,
    Manifest,
    ShardEntry,
    SourceEntry,
    TableFile,
    read_manifest,
)
from dataservice.storage.records import LAYOUTS
from dataservice.storage.tables import IMAGES, MEMBERS, SAMPLES, Table, gather_ranges
from dataservice.storage.zips import PLAIN_FILE


class _Archive:
    """A zip, or the used files of a folder, shared by the sources that refer to it."""

    def __init__(self, index_dir: str, entry: ArchiveEntry) -> None:
        self._index_dir = index_dir
        self.entry = entry

    @cached_property
    def _table(self) -> Table:
        return _table(self._index_dir, self.entry.members, MEMBERS)

    @cached_property
    def members(self) -> dict[str, NDArray[Any]]:
        return self._table.columns

    @cached_property
    def names(self) -> Any:
        return self._table.strings("name")


class _Shard:
    """A JSONL file of a source and its tables."""

    def __init__(self, index: Index, source: SourceEntry, entry: ShardEntry) -> None:
        self._index_dir = index.index_dir
        self._archives = index.archives
        self._source = source
        self.entry = entry
        self.ref = ShardRef(
            source=source.name,
            name=entry.name,
            url=entry.url,
            size_bytes=entry.size_bytes,
            mtime_ns=entry.mtime_ns,
        )
        self.key_prefix = f"{source.name}/{entry.name}@"

    @cached_property
    def samples(self) -> dict[str, NDArray[Any]]:
        return _table(self._index_dir, self.entry.samples, SAMPLES).columns

    @cached_property
    def images(self) -> dict[str, NDArray[Any]]:
        return _table(self._index_dir, self.entry.images, IMAGES).columns

    @cached_property
    def archives(self) -> list[tuple[_Archive, ShardRef | None]]:
        """Each with its shard; None for a folder, whose files are shards of their own."""
        found = []
        for position in self.entry.archives:
            archive = self._archives[position]
            found.append((archive, self._zip_ref(archive.entry)))
        return found

    def _zip_ref(self, entry: ArchiveEntry) -> ShardRef | None:
        if entry.kind == "folder":
            return None
        return ShardRef(
            source=self._source.name,
            name=name_below(self._source.root, entry.url),
            url=entry.url,
            size_bytes=entry.size_bytes,
            mtime_ns=entry.mtime_ns,
        )

    def image_shard(self, number: int, member: int) -> ShardRef:
        """The shard that holds a member of the shard's archive `number`."""
        archive, ref = self.archives[number]
        if ref is not None:
            return ref
        url = posixpath.join(archive.entry.url, archive.names[member].as_py())
        return ShardRef(
            source=self._source.name,
            name=name_below(self._source.root, url),
            url=url,
            size_bytes=archive.members["size_bytes"].item(member),
            mtime_ns=archive.members["mtime_ns"].item(member),
        )


class _Source:
    def __init__(self, index: Index, entry: SourceEntry) -> None:
        self.entry = entry
        self.shards = [_Shard(index, entry, shard) for shard in entry.shards]
        self.starts = [0, *accumulate(shard.num_samples for shard in entry.shards)]
        """Row number of each shard's first sample, and the source's number of samples."""
        self.start_array = np.array(self.starts, dtype=np.int64)
        self.stats = SourceStats(
            name=entry.name,
            shard_names=tuple(shard.name for shard in entry.shards),
            shard_samples=tuple(shard.num_samples for shard in entry.shards),
            fingerprint=entry.fingerprint,
        )

    def locate(self, row: int) -> tuple[_Shard, int]:
        number = bisect.bisect_right(self.starts, row) - 1
        return self.shards[number], row - self.starts[number]

    def split(self, rows: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """(number of a shard, places in `rows` that lie in it), for each shard touched."""
        if not len(rows):
            return []
        if rows.min() < 0 or rows.max() >= self.starts[-1]:
            raise IndexError(f"source {self.entry.name} has {self.starts[-1]} samples")
        shard = np.searchsorted(self.start_array, rows, side="right") - 1
        order = np.argsort(shard, kind="stable")
        touched, first = np.unique(shard[order], return_index=True)
        return list(zip(touched.tolist(), np.split(order, first[1:]), strict=True))


class Index:
    """`core.plan.IndexView` over the files of an index folder. See `open`."""

    def __init__(self, index_dir: str, manifest: Manifest) -> None:
        self.index_dir = index_dir
        self.manifest = manifest
        self.archives = [_Archive(index_dir, entry) for entry in manifest.archives]
        self._sources = [_Source(self, entry) for entry in manifest.sources]
        self._crc = {s.url: s.crc32 for source in manifest.sources for s in source.shards}

    @classmethod
    def open(cls, index_dir: str) -> Index:
        """Raises StaleIndexError when there is no index of this version, or a damaged one."""
        return cls(index_dir, read_manifest(index_dir))

    @property
    def digest(self) -> str:
        """Of the whole manifest."""
        return self.manifest.digest

    @property
    def fingerprint(self) -> str:
        return self.manifest.counter

    @property
    def sources(self) -> tuple[SourceStats, ...]:
        return tuple(source.stats for source in self._sources)

    def columns(self, source: int, rows: NDArray[np.int64]) -> SampleColumns:
        """Rows of a source in the order asked for; raises IndexError past its end."""
        found = self._sources[source]
        parts = found.split(rows)
        text = np.empty(len(rows), dtype=np.int64)
        loss = np.empty(len(rows), dtype=np.int64)
        counts = np.zeros(len(rows) + 1, dtype=np.int64)
        image_rows = []
        for number, places in parts:
            samples = found.shards[number].samples
            local = rows[places] - found.starts[number]
            text[places] = samples["text_tokens"][local]
            loss[places] = samples["loss_tokens"][local]
            counts[places + 1] = samples["num_images"][local]
            image_rows.append(samples["image_start"][local])
        offsets = np.cumsum(counts)
        width = np.empty(offsets[-1], dtype=np.int64)
        height = np.empty(offsets[-1], dtype=np.int64)
        for (number, places), starts in zip(parts, image_rows, strict=True):
            if not counts[places + 1].any():
                continue
            images = found.shards[number].images
            read = gather_ranges(starts, counts[places + 1])
            written = gather_ranges(offsets[places], counts[places + 1])
            width[written] = images["width"][read]
            height[written] = images["height"][read]
        return SampleColumns(
            text_tokens=text, loss_tokens=loss, image_offsets=offsets, width=width, height=height
        )

    def pack_spec(
        self, window: WindowPlan, number: int, *, pack_length: int, rules: VisionRules
    ) -> PackSpec:
        """All that a worker needs to build pack `number` of the window."""
        begin, end = window.item_offsets[number : number + 2].tolist()
        shards: dict[ShardRef, int] = {}
        items = [
            self._item(shards, rules, *values)
            for values in zip(
                window.source[begin:end].tolist(),
                window.row[begin:end].tolist(),
                window.start[begin:end].tolist(),
                window.stop[begin:end].tolist(),
                window.total_tokens[begin:end].tolist(),
                strict=True,
            )
        ]
        return PackSpec(
            pack_id=f"{window.lane}.{window.window}.{number}",
            pack_length=pack_length,
            shards=tuple(shards),
            items=tuple(items),
            num_tokens=int(window.tokens[number]),
            num_patches=int(window.num_patches[number]),
        )

    def shards_of(self, window: WindowPlan) -> tuple[ShardRef, ...]:
        """Every shard that the window's packs read, in the order of first need."""
        first: dict[ShardRef, int] = {}
        for source in np.unique(window.source).tolist():
            found = self._sources[source]
            places = np.flatnonzero(window.source == source)
            rows = window.row[places]
            for number, inside in found.split(rows):
                shard = found.shards[number]
                at = places[inside]
                _keep_first(first, shard.ref, int(at.min()))
                samples = shard.samples
                local = rows[inside] - found.starts[number]
                counts = samples["num_images"][local]
                if not counts.any():
                    continue
                images = gather_ranges(samples["image_start"][local], counts)
                archive = shard.images["archive"][images]
                member = shard.images["member"][images]
                users = np.repeat(at, counts)
                for use, archive_number, member_number in _first_uses(
                    users, archive, member, [ref is None for _, ref in shard.archives]
                ):
                    _keep_first(first, shard.image_shard(archive_number, member_number), use)
        return tuple(sorted(first, key=lambda ref: first[ref]))

    def shard_crc(self, shard: ShardRef) -> int:
        """CRC-32 of the whole file, -1 where the index does not know it (archives)."""
        return self._crc.get(shard.url, -1)

    def _item(
        self,
        shards: dict[ShardRef, int],
        rules: VisionRules,
        source: int,
        row: int,
        start: int,
        stop: int,
        total_tokens: int,
    ) -> ItemSpec:
        found = self._sources[source]
        shard, local = found.locate(row)
        samples = shard.samples
        offset = samples["offset"].item(local)
        first = samples["image_start"].item(local)
        count = samples["num_images"].item(local)
        own = shards.setdefault(shard.ref, len(shards))
        return ItemSpec(
            key=f"{shard.key_prefix}{offset}",
            source=found.entry.name,
            layout=LAYOUTS[samples["layout"].item(local)],
            shard=own,
            offset=offset,
            length=samples["length"].item(local),
            crc32=samples["crc32"].item(local),
            start=start,
            stop=stop,
            total_tokens=total_tokens,
            images=tuple(
                _image_spec(shards, rules, shard, row) for row in range(first, first + count)
            ),
        )


def _image_spec(
    shards: dict[ShardRef, int], rules: VisionRules, shard: _Shard, row: int
) -> ImageSpec:
    images = shard.images
    number = images["archive"].item(row)
    member = images["member"].item(row)
    width = images["width"].item(row)
    height = images["height"].item(row)
    target_height, target_width = target_size(
        height,
        width,
        patch=rules.patch,
        merge=rules.merge,
        min_pixels=rules.min_pixels,
        max_pixels=rules.max_pixels,
    )
    archive = shard.archives[number][0]
    members = archive.members
    method = members["method"].item(member)
    return ImageSpec(
        shard=shards.setdefault(shard.image_shard(number, member), len(shards)),
        member=archive.names[member].as_py(),
        offset=members["offset"].item(member),
        stored_bytes=members["stored_bytes"].item(member),
        size_bytes=members["size_bytes"].item(member),
        method=method,
        crc32=-1 if method == PLAIN_FILE else members["crc32"].item(member),
        width=width,
        height=height,
        target_width=target_width,
        target_height=target_height,
    )


def _first_uses(
    users: NDArray[np.int64],
    archive: NDArray[np.uint32],
    member: NDArray[np.uint32],
    is_folder: list[bool],
) -> list[tuple[int, int, int]]:
    """(first user, archive, member) for each zip, and for each file of a folder."""
    order = np.argsort(users, kind="stable")
    own = np.where(np.array(is_folder, dtype=bool)[archive], member.astype(np.int64) + 1, 0)
    key = archive.astype(np.int64) << 33 | own
    _, first = np.unique(key[order], return_index=True)
    chosen = order[first]
    return list(
        zip(
            users[chosen].tolist(),
            archive[chosen].tolist(),
            member[chosen].tolist(),
            strict=True,
        )
    )


def _keep_first(first: dict[ShardRef, int], ref: ShardRef, use: int) -> None:
    if use < first.get(ref, use + 1):
        first[ref] = use


def _table(index_dir: str, file: TableFile, schema: Any) -> Table:
    return Table(os.path.join(index_dir, file.name), schema, size_bytes=file.size_bytes)
