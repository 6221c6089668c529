"""Specs of packs from an index's tables: the columns of many packs are read at once.

Invariants: a spec is the same whether it is made alone or with others; of a window's packs, a block
of names is decoded once; nothing is read but what the packs need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec, ShardRef
from dataservice.core.tables import WindowPlan
from dataservice.core.vision import VisionRules, planned_size, planned_sizes
from dataservice.storage.image_places import ImagePlace, inside_place, member_places
from dataservice.storage.index_files import IndexShard
from dataservice.storage.records import LAYOUTS
from dataservice.storage.tables import gather_ranges

Ints = NDArray[np.int64]
Refs = dict[ShardRef, ShardRef]
"""To themselves: so that equal ones are one object."""
Split = Sequence[tuple[IndexShard, Ints, Ints]]
"""(shard, rows in it, their places among the items) of each shard touched."""


@dataclass(slots=True)
class _Image:
    ref: ShardRef
    place: ImagePlace
    size: tuple[int, int, int, int]
    """Width, height, target width, target height."""


@dataclass(slots=True)
class _Record:
    ref: ShardRef
    key_prefix: str
    offset: int
    length: int
    crc32: int
    layout: int
    images: list[_Image]


def specs_of(
    window: WindowPlan, numbers: Sequence[int], items: Ints, split: Split, rules: VisionRules
) -> list[PackSpec]:
    """Of packs `numbers` of a window, in that order. `items` are the numbers that their items have
    in the window, pack by pack; `split` says where the records of these are."""
    refs: Refs = {}
    records: list[_Record | None] = [None] * len(items)
    for shard, rows, places in split:
        of_shard = _records(refs, shard, rows, window.image_limit[items[places]], rules)
        for place, record in zip(places.tolist(), of_shard, strict=True):
            records[place] = record
    columns = (window.start, window.stop, window.total_tokens, window.kept_images)
    found = zip(records, *(column[items].tolist() for column in columns), strict=True)
    counts = np.diff(window.item_offsets)[numbers].tolist()
    specs: list[PackSpec] = []
    for number, count in zip(numbers, counts, strict=True):
        shards: dict[int, tuple[int, ShardRef]] = {}
        made = [_item(shards, *next(found)) for _ in range(count)]
        specs.append(
            PackSpec(
                pack_id=f"{window.lane}.{window.window}.{number}",
                pack_length=window.pack_length,
                shards=tuple(ref for _, ref in shards.values()),
                items=tuple(made),
                num_tokens=int(window.tokens[number]),
                num_patches=int(window.num_patches[number]),
                align=window.align,
            )
        )
    return specs


def _item(
    shards: dict[int, tuple[int, ShardRef]],
    record: _Record | None,
    start: int,
    stop: int,
    total_tokens: int,
    kept_images: int,
) -> ItemSpec:
    """`shards`: of the pack, by identity, with their numbers; grows."""
    assert record is not None
    own = _number(shards, record.ref)
    return ItemSpec(
        key=f"{record.key_prefix}{record.offset}",
        source=record.ref.source,
        layout=LAYOUTS[record.layout],
        shard=own,
        offset=record.offset,
        length=record.length,
        crc32=record.crc32,
        start=start,
        stop=stop,
        total_tokens=total_tokens,
        images=tuple(_image_spec(shards, image) for image in record.images),
        kept_images=kept_images,
    )


def _image_spec(shards: dict[int, tuple[int, ShardRef]], image: _Image) -> ImageSpec:
    place, size = image.place, image.size
    return ImageSpec(
        shard=_number(shards, image.ref),
        member=place.member,
        offset=place.offset,
        stored_bytes=place.stored_bytes,
        size_bytes=place.size_bytes,
        method=place.method,
        crc32=place.crc32,
        width=size[0],
        height=size[1],
        target_width=size[2],
        target_height=size[3],
    )


def _number(shards: dict[int, tuple[int, ShardRef]], ref: ShardRef) -> int:
    known = shards.get(id(ref))
    if known is None:
        known = shards[id(ref)] = (len(shards), ref)
    return known[0]


def _records(
    refs: Refs, shard: IndexShard, rows: Ints, limits: Ints, rules: VisionRules
) -> Iterator[_Record]:
    """`limits`: of each row's images."""
    samples = shard.samples
    offset, length, counts = (
        samples[name].take(rows) for name in ("offset", "length", "num_images")
    )
    where = gather_ranges(samples["image_start"].take(rows), counts)
    of_row = np.repeat(np.arange(len(rows)), counts)
    images = iter(
        _images(refs, shard, where, offset[of_row], length[of_row], limits[of_row], rules)
    )
    ref, prefix = refs.setdefault(shard.ref, shard.ref), shard.key_prefix
    columns = (offset, length, samples["crc32"].take(rows), samples["layout"].take(rows), counts)
    for *values, count in zip(*(column.tolist() for column in columns), strict=True):
        yield _Record(ref, prefix, *values, [next(images) for _ in range(count)])


def _images(
    refs: Refs,
    shard: IndexShard,
    rows: Ints,
    offset: Ints,
    length: Ints,
    limits: Ints,
    rules: VisionRules,
) -> list[_Image]:
    """`offset` and `length`: of the record that each image belongs to."""
    if not len(rows):
        return []
    archive, member, width, height = (
        shard.images[name].take(rows) for name in ("archive", "member", "width", "height")
    )
    target_height, target_width = _targets(height, width, limits, rules)
    sides = (width, height, target_width, target_height)
    sizes = list(zip(*(side.tolist() for side in sides), strict=True))
    found: list[_Image | None] = [None] * len(rows)
    for number in np.unique(archive).tolist():
        these = np.flatnonzero(archive == number)
        places = _places(refs, shard, number, member[these], offset[these], length[these])
        for at, (ref, place) in zip(these.tolist(), places, strict=True):
            found[at] = _Image(ref, place, sizes[at])
    return [image for image in found if image is not None]


def _targets(height: Ints, width: Ints, limits: Ints, rules: VisionRules) -> tuple[Ints, Ints]:
    """As `planned_size` gives them, which alone knows limits below the least size."""
    least = rules.min_tiles if rules.mode == "tiles" else rules.min_pixels
    high, wide = planned_sizes(height, width, rules, np.maximum(limits, least))
    for i in np.flatnonzero(limits < least).tolist():
        high[i], wide[i] = planned_size(int(height[i]), int(width[i]), rules, int(limits[i]))
    return high, wide


def _places(
    refs: Refs, shard: IndexShard, number: int, member: Ints, offset: Ints, length: Ints
) -> Iterator[tuple[ShardRef, ImagePlace]]:
    """Of images in archive `number` of the shard's."""
    archive, found = shard.archives[number]
    ref = None if found is None else refs.setdefault(found, found)
    if archive.entry.members is None:
        assert ref is not None
        values = zip(member.tolist(), offset.tolist(), length.tolist(), strict=True)
        column = archive.entry.column
        return ((ref, inside_place(column, *value)) for value in values)
    places = member_places(archive.members, archive.names_of(member), member)
    if ref is not None:
        return ((ref, place) for place in places)
    files = {at: shard.image_shard(number, at) for at in np.unique(member).tolist()}
    of = {at: refs.setdefault(file, file) for at, file in files.items()}
    return ((of[at], place) for at, place in zip(member.tolist(), places, strict=True))
