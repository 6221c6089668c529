"""Brings the index of a config up to date: storage's index with the pipeline's token counts.

Invariants: shards that did not change are not read again; an index that is up to date costs a
stat of every shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from dataservice.config import Config
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.index_build import build_index
from dataservice.storage.index_executor import IndexExecutor
from dataservice.storage.index_report import REJECTED_NAME, IndexProgress, IndexReport
from dataservice.storage.index_shard import RejectedRecord
from dataservice.storage.lazy import (
    CountingHere,
    LazyIndex,
    ScanProgress,
    ScanReport,
    check_lazy_plan,
    scan_sources,
)
from dataservice.storage.tables import write_atomically

__all__ = [
    "LazyRejected",
    "open_lazy_index",
    "scan_lazy_index",
    "update_index",
    "write_lazy_rejected",
]


def update_index(
    config: Config,
    progress: Callable[[IndexProgress], None] | None = None,
    *,
    executor: IndexExecutor | None = None,
) -> IndexReport:
    """Indexes what is new or changed, by `executor` or as it fits this machine; the report names
    what could not be used."""
    return build_index(
        config.sources,
        config.index_dir,
        counter=partial(TextRenderer.build, config.text),
        progress=progress,
        executor=executor,
        deadline_s=config.staging.deadline_s,
    )


def scan_lazy_index(
    config: Config, progress: Callable[[ScanProgress], None] | None = None
) -> ScanReport:
    """Finds the records of what is new or changed, and counts nothing. Raises ConfigError also for
    a plan that cannot do without all counts."""
    check_lazy_plan(config.plan)
    return scan_sources(
        config.sources,
        config.index_dir,
        counter=TextRenderer.build(config.text).fingerprint,
        progress=progress,
        deadline_s=config.staging.deadline_s,
        threads=os.cpu_count() or 1,
    )


def open_lazy_index(config: Config) -> LazyIndex:
    """One that counts in this process what it is asked for, and keeps it."""
    index = LazyIndex.open(config.index_dir)
    here = CountingHere(
        index,
        config.sources,
        TextRenderer.build(config.text),
        deadline_s=config.staging.deadline_s,
        retries=config.staging.retries,
    )
    index.blocks.on_missing = here.count_all
    index.on_close(here.close)
    return index


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyRejected:
    """What was counted of a lazy index, and what was found that cannot be used."""

    counted_blocks: int
    all_blocks: int
    num_rejected: int
    path: str
    """A JSONL file with one line for each of them."""


def write_lazy_rejected(config: Config) -> LazyRejected:
    """Reads all that is kept of the lazy index."""
    path = os.path.join(config.index_dir, REJECTED_NAME)
    index = LazyIndex.open(config.index_dir)
    count = 0

    def write(file: BinaryIO) -> None:
        nonlocal count
        for source, shard, found in index.rejected():
            record = RejectedRecord(
                source=source.name,
                file=shard.url,
                line=found.line,
                offset=found.offset,
                reason=found.reason,
            )
            file.write(record.as_line())
            count += 1

    write_atomically(path, write)
    blocks = sum(of.num_blocks for of in index.lazy.block_files())
    counted = index.num_counted()
    index.close()
    return LazyRejected(counted_blocks=counted, all_blocks=blocks, num_rejected=count, path=path)
