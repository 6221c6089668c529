"""What the plan reads of an index and what it gives: plain records of integer columns.

Invariants: one row a sample, one array a column, no Python object per sample; arrays of a record
are read-only by convention and shared between readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.settings import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStats:
    """What the plan must know of a source before it reads a row."""

    name: str
    shard_names: tuple[str, ...]
    shard_samples: tuple[int, ...]
    """Good samples of each shard, in the order of `shard_names`."""
    fingerprint: str
    """Changes with any shard's size, content or token counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """Rows of one source, in the order asked for; images of row i are image_offsets[i]:[i+1]."""

    text_tokens: NDArray[np.int64]
    """Every token but image tokens."""
    loss_tokens: NDArray[np.int64]
    image_offsets: NDArray[np.int64]
    width: NDArray[np.int64]
    height: NDArray[np.int64]


class IndexView(Protocol):
    """What the plan needs of an index; storage.index has the real one, tests a synthetic one."""

    @property
    def fingerprint(self) -> str:
        """Of tokenizer, template and everything else that token counts depend on."""

    @property
    def sources(self) -> tuple[SourceStats, ...]: ...

    def columns(self, source: int, rows: NDArray[np.int64]) -> SampleColumns:
        """`rows` are sample numbers of the source: shards concatenated in `shard_names` order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """The packs of one window. Pack k holds items item_offsets[k]:item_offsets[k+1]."""

    lane: int
    window: int
    item_offsets: NDArray[np.int64]
    source: NDArray[np.int64]
    row: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    total_tokens: NDArray[np.int64]
    # one value a pack
    tokens: NDArray[np.int64]
    image_tokens: NDArray[np.int64]
    num_images: NDArray[np.int64]
    num_patches: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    cost: NDArray[np.int64]
    # counts by source number, of samples that are in no pack
    dropped_oversize: NDArray[np.int64]
    """With images and longer than a pack."""
    dropped_empty: NDArray[np.int64]
    """Without a token."""

    @property
    def num_packs(self) -> int:
        return len(self.item_offsets) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step; the arrays have one value a pack, M in all, in global pack order."""

    step: int
    grid: Grid
    cursor: Cursor
    next_cursor: Cursor
    """Valid also at the end, where `Plan.step` answers None for it."""
    lane: NDArray[np.int64]
    """-1 for padding packs."""
    window: NDArray[np.int64]
    number: NDArray[np.int64]
    """Of the pack in its window."""
    tokens: NDArray[np.int64]
    image_tokens: NDArray[np.int64]
    num_images: NDArray[np.int64]
    num_patches: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    cost: NDArray[np.int64]
    home: NDArray[np.int64]
    micro_step: NDArray[np.int64]
    dp_rank: NDArray[np.int64]
    lockstep_cost: int
    """Sum over micro-steps of the costliest rank, as placed."""
    lockstep_bound: int
    lockstep_arrival: int
    """The same had the packs been dealt in arrival order."""
    moved: int
    """Packs on a rank that is not on their home node (homes of -1 not counted)."""

    @property
    def total_loss_tokens(self) -> int:
        return int(self.loss_tokens.sum())

    def pack_id(self, i: int) -> str:
        if self.lane[i] < 0:
            return "pad"
        return f"{self.lane[i]}.{self.window[i]}.{self.number[i]}"
