"""The index as the plan and the workers' specs need it, over memory-mapped tables.

Invariants: opening reads the manifest only, a shard's tables are mapped at its first use, and a
call costs only the rows it is asked for; nothing is as long as the data but the mapped files; no
build removes files of an index that is open. The object may be read by many threads. Resolving a
pack of ten items takes 0.1 to 0.4 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dataservice.core.order.shares import kind_samples
from dataservice.core.packspec import PackSpec, ShardRef
from dataservice.core.settings import Kind
from dataservice.core.tables import SampleColumns, SourceStats, WindowPlan
from dataservice.core.vision import VisionRules
from dataservice.storage.index_files import IndexArchive, IndexShard, IndexSource, IndexTables
from dataservice.storage.index_folder import keep_open
from dataservice.storage.index_specs import specs_of
from dataservice.storage.manifest import Manifest, ShardEntry, SourceEntry, read_manifest
from dataservice.storage.tables import gather_ranges

Ints = NDArray[np.int64]


class _Rows:
    """Where the rows of sources are: those of all shards of all sources, one after the other."""

    def __init__(
        self, sources: Sequence[IndexSource], counts: Sequence[Sequence[int]], what: str
    ) -> None:
        """`counts[i]` are the rows of each shard of source i; `what` they are, for errors."""
        self._sources = sources
        self._what = what
        self._shards = [shard for source in sources for shard in source.shards]
        sizes = [size for source in counts for size in source]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._sizes = np.array([sum(source) for source in counts], dtype=np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes

    def split(self, source: int | Ints, rows: Ints) -> list[tuple[IndexShard, Ints, Ints]]:
        """(shard, numbers in it, their places in `rows`) for each shard touched; IndexError for a
        row that its source does not have."""
        bad = np.flatnonzero((rows < 0) | (rows >= self._sizes[source]))
        if bad.size:
            number = int(np.broadcast_to(source, rows.shape)[bad[0]])
            raise IndexError(
                f"source {self._sources[number].entry.name} has {self._sizes[number]} "
                f"{self._what}, number {rows[bad[0]]} was asked for"
            )
        numbers = rows + self._first[source]
        shard = np.searchsorted(self._starts, numbers, side="right") - 1
        places = np.argsort(shard, kind="stable")
        local = (numbers - self._starts[shard])[places]
        shard = shard[places]
        edges = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(shard)]
        return [
            (self._shards[shard[first]], local[first:stop], places[first:stop])
            for first, stop in pairwise(edges)
            if first < stop
        ]


class Index:
    """`core.tables.IndexView` over the files of an index folder. See `open`."""

    def __init__(self, index_dir: str, manifest: Manifest) -> None:
        self.index_dir = index_dir
        keep_open(index_dir, self)
        self.manifest = manifest
        self.tables = IndexTables(index_dir)
        self.archives = [IndexArchive(self.tables, entry) for entry in manifest.archives]
        self._sources = [IndexSource(self, entry) for entry in manifest.sources]
        self._rows = _Rows(self._sources, [of.shard_samples for of in self.sources], "samples")
        self._crc = {s.url: s.crc32 for source in manifest.sources for s in source.shards}

    @classmethod
    def open(cls, index_dir: str) -> Index:
        """Raises StaleIndexError when there is no index of this version, or a damaged one."""
        return cls(index_dir, read_manifest(index_dir))

    def make_shard(self, source: SourceEntry, entry: ShardEntry, first_row: int) -> IndexShard:
        return IndexShard(self, source, entry, first_row)

    def stats_of(self, entry: SourceEntry) -> SourceStats:
        return SourceStats(
            name=entry.name,
            shard_names=tuple(shard.name for shard in entry.shards),
            shard_samples=tuple(shard.num_samples for shard in entry.shards),
            shard_text_samples=tuple(shard.num_text_samples for shard in entry.shards),
            shard_vision_samples=tuple(shard.num_vision_samples for shard in entry.shards),
            fingerprint=entry.fingerprint,
        )

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

    @cached_property
    def _kind_rows(self) -> dict[Kind, _Rows]:
        return {
            kind: _Rows(
                self._sources, [kind_samples(of, kind) for of in self.sources], f"{kind} samples"
            )
            for kind in get_args(Kind)
        }

    def columns(self, source: int | Ints, rows: Ints) -> SampleColumns:
        """Rows in the order asked for, of one source or of one a row; IndexError past its end."""
        parts = self._rows.split(source, rows)
        by_row = {
            name: np.empty(len(rows), dtype=np.int64)
            for name in ("text_tokens", "loss_tokens", "num_docs", "num_images", "image_start")
        }
        for shard, local, places in parts:
            samples = shard.samples
            for name, values in by_row.items():
                values[places] = samples[name].take(local)
        counts, starts = by_row["num_images"], by_row["image_start"]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        with_images = [(shard, places) for shard, _, places in parts if counts[places].any()]
        read = [gather_ranges(starts[places], counts[places]) for _, places in with_images]
        by_image = {
            name: np.empty(offsets[-1], dtype=np.int64)
            for name in ("width", "height", "text_before", "markup")
        }
        if with_images:
            places = np.concatenate([places for _, places in with_images])
            written = gather_ranges(offsets[places], counts[places])
            for name, values in by_image.items():
                values[written] = np.concatenate(
                    [
                        shard.images[name].take(wanted)
                        for (shard, _), wanted in zip(with_images, read, strict=True)
                    ]
                )
        return SampleColumns(
            text_tokens=by_row["text_tokens"],
            loss_tokens=by_row["loss_tokens"],
            image_offsets=offsets,
            num_docs=by_row["num_docs"],
            **by_image,
        )

    def rows_of_kind(self, source: int | Ints, kind: Kind, numbers: Ints) -> Ints:
        """Rows of a source's n-th samples without ("text") or with images ("vision"), of one source
        or of one a number; IndexError past the last of them."""
        rows = np.empty(len(numbers), dtype=np.int64)
        for shard, local, places in self._kind_rows[kind].split(source, numbers):
            first = shard.entry.num_text_samples if kind == "vision" else 0
            rows[places] = shard.samples["by_kind"].take(local + first) + shard.first_row
        return rows

    def pack_spec(self, window: WindowPlan, number: int, *, rules: VisionRules) -> PackSpec:
        """All that a worker needs to build pack `number` of the window."""
        return self.pack_specs(window, [number], rules=rules)[0]

    def pack_specs(
        self, window: WindowPlan, numbers: Sequence[int], *, rules: VisionRules
    ) -> list[PackSpec]:
        """Of several packs of a window.

        An image's size follows `rules` with the limit of its item in the window.
        """
        items = items_of(window, numbers)
        split = self._rows.split(window.source[items], window.row[items])
        return specs_of(window, numbers, items, split, rules)

    def shards_of(self, window: WindowPlan) -> tuple[ShardRef, ...]:
        """Every shard that the window's packs read, in the order of first need."""
        first: dict[ShardRef, int] = {}
        for shard, local, at in self._rows.split(window.source, window.row):
            _keep_first(first, shard.ref, int(at.min()))
            counts = window.kept_images[at]
            if not counts.any():
                continue
            images = gather_ranges(shard.samples["image_start"].take(local), counts)
            archive = shard.images["archive"].take(images)
            member = shard.images["member"].take(images)
            users = np.repeat(at, counts)
            for use, archive_number, member_number in _first_uses(
                users, archive, member, [ref is None for _, ref in shard.archives]
            ):
                _keep_first(first, shard.image_shard(archive_number, member_number), use)
        return tuple(sorted(first, key=lambda ref: (first[ref], ref.url)))

    def shards_beside(self, source: int, number: int) -> tuple[ShardRef, ...]:
        """Record file `number` of a source, and the archives that its images are in; no files of
        folders."""
        shard = self._sources[source].shards[number]
        refs = (ref for _, ref in shard.archives if ref is not None)
        return tuple(dict.fromkeys((shard.ref, *refs)))

    def offsets_among(self, source: str, shard: str, offsets: Sequence[int]) -> set[int]:
        """Those at which a record of a file of the source begins."""
        (found,) = (of for of in self._sources if of.entry.name == source)
        (file,) = (of for of in found.shards if of.entry.name == shard)
        known = file.samples["offset"].slice(0, file.entry.num_samples)
        return set(known[np.isin(known, np.array(offsets, dtype=np.int64))].tolist())

    def shard_crc(self, shard: ShardRef) -> int:
        """CRC-32 of the whole file, -1 where the index does not know it (archives)."""
        return self._crc.get(shard.url, -1)


def items_of(window: WindowPlan, numbers: Sequence[int]) -> Ints:
    """Numbers of the items of packs, pack by pack."""
    begins, ends = window.item_offsets[:-1][numbers], window.item_offsets[1:][numbers]
    return gather_ranges(begins, ends - begins)


def _first_uses(
    users: NDArray[np.int64],
    archive: Ints,
    member: Ints,
    is_folder: list[bool],
) -> list[tuple[int, int, int]]:
    """(first user, archive, member) for each zip, and for each file of a folder."""
    own = np.where(np.array(is_folder, dtype=bool)[archive], member + 1, 0)
    order = np.lexsort((users, own, archive))
    pairs = archive[order], own[order]
    changes = (pairs[0][1:] != pairs[0][:-1]) | (pairs[1][1:] != pairs[1][:-1])
    chosen = order[np.concatenate([[0], np.flatnonzero(changes) + 1])]
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
