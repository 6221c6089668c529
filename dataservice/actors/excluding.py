"""Samples that are left out on purpose: whether they are there, and what holes they make.

Invariants: such a sample is a hole as a whole, its record and every picture of it, and none of it
is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dataservice.core.exclusions import Exclusions, parts_of_key
from dataservice.core.packspec import PackSpec
from dataservice.errors import ConfigError
from dataservice.pipeline.reading import hole_key, record_key
from dataservice.storage.index import Index
from dataservice.storage.lazy import LazyIndex


def excluded_holes(
    specs: Sequence[PackSpec], excluded: Collection[str]
) -> tuple[dict[str, tuple[str, ...]], int]:
    """Pack id -> hole keys of its samples that are `excluded`; and how many samples these are."""
    found: dict[str, tuple[str, ...]] = {}
    samples: set[str] = set()
    for spec in specs if excluded else ():
        pictures = {item.key: len(item.kept) for item in spec.items if item.key in excluded}
        if pictures:
            found[spec.pack_id] = tuple(
                hole
                for key, count in pictures.items()
                for hole in (record_key(key), *(hole_key(key, i) for i in range(count)))
            )
            samples |= pictures.keys()
    return found, len(samples)


def check_excluded_samples(exclude: Exclusions, index: Index | LazyIndex) -> None:
    """ConfigError for a sample that is not there; of a lazy index, whose file is not there."""
    shards = {source.name: frozenset(source.shard_names) for source in index.sources}
    offsets: dict[tuple[str, str], set[int]] = {}
    for sample in exclude.samples:
        source, shard, offset = parts_of_key(sample.key)
        if source not in shards:
            known = ", ".join(sorted(shards))
            raise ConfigError(f"exclude: sample {sample.key}: the source is none of {known}")
        if shard not in shards[source]:
            raise _not_there(sample.key, f"source {source} has no record file of this name")
        offsets.setdefault((source, shard), set()).add(offset)
    if isinstance(index, LazyIndex):
        return
    for (source, shard), wanted in sorted(offsets.items()):
        if missing := wanted - index.offsets_among(source, shard, sorted(wanted)):
            key = f"{source}/{shard}@{min(missing)}"
            raise _not_there(key, "no record of the file begins there")


def _not_there(key: str, why: str) -> ConfigError:
    return ConfigError(
        f'exclude: sample {key}: {why}; take the key from batch.meta["sample_keys"] or '
        "`dataservice plan`"
    )
