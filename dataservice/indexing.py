"""Brings the index of a config up to date: storage's index with the pipeline's token counts.

Invariants: shards that did not change are not read again; an index that is up to date costs a
stat of every shard.
"""

from __future__ import annotations

from collections.abc import Callable

from dataservice.config import Config
from dataservice.pipeline.text import TextRenderer
from dataservice.storage.index import Index
from dataservice.storage.index_build import IndexProgress, IndexReport, build_index

__all__ = ["build_or_open_index", "update_index"]


def update_index(
    config: Config, progress: Callable[[IndexProgress], None] | None = None
) -> IndexReport:
    """Indexes what is new or changed; the report names what could not be used."""
    return build_index(
        config.sources,
        config.index_dir,
        counter=TextRenderer.build(config.text),
        progress=progress,
        deadline_s=config.staging.deadline_s,
    )


def build_or_open_index(
    config: Config, progress: Callable[[IndexProgress], None] | None = None
) -> Index:
    """The index as the config's data stands now, built first where it is not up to date."""
    update_index(config, progress)
    return Index.open(config.index_dir)
