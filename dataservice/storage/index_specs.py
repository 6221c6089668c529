"""Specs of packs from an index's tables: the columns of many packs are read at once.

Invariants: a spec is the same whether it is made alone or with others; of a window's packs, a block
of names is decoded once; nothing is read but what the packs need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec, ShardRef
from dataservice.core.tables import WindowPlan
from dataservice.core.vision import VisionRules, planned_size, planned_sizes
from dataservice.storage.image_places import inside_place, member_columns
from dataservice.storage.index_files import IndexShard
from dataservice.storage.records import LAYOUTS
from dataservice.storage.tables import gather_ranges

Ints = NDArray[np.int64]
Refs = dict[ShardRef, ShardRef]
"""To themselves: so that equal ones are one object."""
Numbers = dict[int, tuple[int, ShardRef]]
"""Of the shards of a pack, by identity: their numbers in it."""
Split = Sequence[tuple[IndexShard, Ints, Ints]]
"""(shard, rows in it, their places among the items) of each shard touched."""
Image = tuple[Any, ...]
"""Its shard, and the other fields of its ImageSpec in their order."""
Record = tuple[Any, ...]
"""Its shard, key prefix, layout, offset, length, CRC and list of Images."""


def specs_of(
    window: WindowPlan, numbers: Sequence[int], items: Ints, split: Split, rules: VisionRules
) -> list[PackSpec]:
    """Of packs `numbers` of a window, in that order. `items` are the numbers that their items have
    in the window, pack by pack; `split` says where the records of these are."""
    refs: Refs = {}
    records: list[Record] = [()] * len(items)
    for shard, rows, places in split:
        of_shard = _records(refs, shard, rows, window.image_limit[items[places]], rules)
        for place, record in zip(places.tolist(), of_shard, strict=True):
            records[place] = record
    columns = (window.start, window.stop, window.total_tokens, window.kept_images)
    parts = zip(*(column[items].tolist() for column in columns), strict=True)
    made = zip(records, parts, strict=True)
    counts = np.diff(window.item_offsets)[numbers].tolist()
    specs: list[PackSpec] = []
    for number, count in zip(numbers, counts, strict=True):
        shards: Numbers = {}
        its_items = [_item(shards, *next(made)) for _ in range(count)]
        specs.append(
            PackSpec(
                pack_id=f"{window.lane}.{window.window}.{number}",
                pack_length=window.pack_length,
                shards=tuple(ref for _, ref in shards.values()),
                items=tuple(its_items),
                num_tokens=int(window.tokens[number]),
                num_patches=int(window.num_patches[number]),
                align=window.align,
            )
        )
    return specs


def _item(shards: Numbers, record: Record, part: tuple[int, int, int, int]) -> ItemSpec:
    ref, prefix, layout, offset, length, crc32, images = record
    own = _number(shards, ref)
    return ItemSpec(
        key=f"{prefix}{offset}",
        source=ref.source,
        layout=layout,
        shard=own,
        offset=offset,
        length=length,
        crc32=crc32,
        start=part[0],
        stop=part[1],
        total_tokens=part[2],
        images=tuple([_image(shards, image) for image in images]),
        kept_images=part[3],
    )


def _image(shards: Numbers, image: Image) -> ImageSpec:
    return ImageSpec(
        shard=_number(shards, image[0]),
        member=image[1],
        offset=image[2],
        stored_bytes=image[3],
        size_bytes=image[4],
        method=image[5],
        crc32=image[6],
        width=image[7],
        height=image[8],
        target_width=image[9],
        target_height=image[10],
    )


def _number(shards: Numbers, ref: ShardRef) -> int:
    known = shards.get(id(ref))
    if known is None:
        known = shards[id(ref)] = (len(shards), ref)
    return known[0]


def _records(
    refs: Refs, shard: IndexShard, rows: Ints, limits: Ints, rules: VisionRules
) -> list[Record]:
    """`limits`: of each row's images."""
    samples = shard.samples
    offset, length, counts = (
        samples[name].take(rows) for name in ("offset", "length", "num_images")
    )
    where = gather_ranges(samples["image_start"].take(rows), counts)
    of_row = np.repeat(np.arange(len(rows)), counts)
    images = _images(refs, shard, where, offset[of_row], length[of_row], limits[of_row], rules)
    ends = np.cumsum(counts)
    ref, prefix = refs.setdefault(shard.ref, shard.ref), shard.key_prefix
    columns = (
        samples["layout"].take(rows),
        offset,
        length,
        samples["crc32"].take(rows),
        ends - counts,
        ends,
    )
    return [
        (ref, prefix, LAYOUTS[layout], at, size, crc32, images[first:end])
        for layout, at, size, crc32, first, end in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _images(
    refs: Refs,
    shard: IndexShard,
    rows: Ints,
    offset: Ints,
    length: Ints,
    limits: Ints,
    rules: VisionRules,
) -> list[Image]:
    """`offset` and `length`: of the record that each image belongs to."""
    if not len(rows):
        return []
    archive, member, width, height = (
        shard.images[name].take(rows) for name in ("archive", "member", "width", "height")
    )
    target_height, target_width = _targets(height, width, limits, rules)
    sizes = (width, height, target_width, target_height)
    found: list[Image] = [()] * len(rows)
    for number in np.unique(archive).tolist():
        these = np.flatnonzero(archive == number)
        places = _places(refs, shard, number, member[these], offset[these], length[these])
        sides = (side[these].tolist() for side in sizes)
        for at, image in zip(these.tolist(), zip(*places, *sides, strict=True), strict=True):
            found[at] = image
    return found


def _targets(height: Ints, width: Ints, limits: Ints, rules: VisionRules) -> tuple[Ints, Ints]:
    """As `planned_size` gives them, which alone knows limits below the least size."""
    least = rules.min_tiles if rules.mode == "tiles" else rules.min_pixels
    high, wide = planned_sizes(height, width, rules, np.maximum(limits, least))
    for i in np.flatnonzero(limits < least).tolist():
        high[i], wide[i] = planned_size(int(height[i]), int(width[i]), rules, int(limits[i]))
    return high, wide


def _places(
    refs: Refs, shard: IndexShard, number: int, member: Ints, offset: Ints, length: Ints
) -> Sequence[Iterable[Any]]:
    """Of images in archive `number` of the shard's, by column: their shards, names, offsets, stored
    and unpacked sizes, methods and CRCs."""
    archive, found = shard.archives[number]
    if archive.entry.members is None:
        assert found is not None
        own = refs.setdefault(found, found)
        values = zip(member.tolist(), offset.tolist(), length.tolist(), strict=True)
        places = [(own, *inside_place(archive.entry.column, *value)) for value in values]
        return list(zip(*places, strict=True))
    if found is not None:
        of = [refs.setdefault(found, found)] * len(member)
    else:
        files = {at: shard.image_shard(number, at) for at in np.unique(member).tolist()}
        of = [refs.setdefault(files[at], files[at]) for at in member.tolist()]
    columns = member_columns(archive.members, member)
    return (of, archive.names_of(member), *(column.tolist() for column in columns))
