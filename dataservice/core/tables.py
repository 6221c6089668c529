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
from dataservice.core.packspec import padding_id
from dataservice.core.settings import Grid, Kind

REASONS = (
    "split",
    "shrunk",
    "truncated",
    "images_cut",
    "over_cap",
    "dropped_long",
    "rejected",
    "cut",
)
"""What happened to samples, counted by source: text-only and longer than a pack, in pieces; images
shrunk until it fits; text cut at the end; the same, and images with it; above a cap, in a pack of
its own; left out as longer than a pack; a record that cannot be used; given up by a phase, at a cut
or as a rest too short for a step. A sample counts under one of the first four at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStats:
    """What the plan must know of a source before it reads a row."""

    name: str
    shard_names: tuple[str, ...]
    shard_samples: tuple[int, ...]
    """Records of each shard, in the order of `shard_names`, also those that cannot be used, which
    have no token."""
    shard_text_samples: tuple[int, ...] | None
    """Good ones without images; None where nobody knows yet, as in a lazy index."""
    fingerprint: str
    """Changes with the shards' content, the archives' and the format, not with what was counted."""
    shard_vision_samples: tuple[int, ...] | None = None
    """Good ones with images; None = all the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """Rows of one source, in the order asked for; images of row i are image_offsets[i]:[i+1]."""

    text_tokens: NDArray[np.int64]
    """Every token but image tokens."""
    loss_tokens: NDArray[np.int64]
    image_offsets: NDArray[np.int64]
    width: NDArray[np.int64]
    height: NDArray[np.int64]
    text_before: NDArray[np.int64] | None = None
    """By image: the text tokens before its markup. Markup of earlier images counts, so with their
    image tokens added this is where the image begins. None where all images stand before the
    text."""
    markup: NDArray[np.int64] | None = None
    """By image: the text tokens that belong to it, such as its start and end; None = none."""
    num_docs: NDArray[np.int64] | None = None
    """Documents of each row; None = one each."""

    @property
    def documents(self) -> NDArray[np.int64]:
        """int64 [N]: how many each row is."""
        return np.ones_like(self.text_tokens) if self.num_docs is None else self.num_docs

    def take(self, where: NDArray[np.int64]) -> SampleColumns:
        """Some of the rows, in the order of `where`."""
        counts = np.diff(self.image_offsets)[where]
        offsets = np.zeros(len(where) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        images = np.arange(offsets[-1]) + np.repeat(
            self.image_offsets[:-1][where] - offsets[:-1], counts
        )
        return SampleColumns(
            text_tokens=self.text_tokens[where],
            loss_tokens=self.loss_tokens[where],
            image_offsets=offsets,
            width=self.width[images],
            height=self.height[images],
            text_before=None if self.text_before is None else self.text_before[images],
            markup=None if self.markup is None else self.markup[images],
            num_docs=None if self.num_docs is None else self.num_docs[where],
        )


class IndexView(Protocol):
    """What the plan needs of an index; storage.index has the real one, tests a synthetic one."""

    @property
    def fingerprint(self) -> str:
        """Of tokenizer, template and everything else that token counts depend on."""

    @property
    def sources(self) -> tuple[SourceStats, ...]: ...

    def columns(self, source: int | NDArray[np.int64], rows: NDArray[np.int64]) -> SampleColumns:
        """`rows` are sample numbers of the source: shards concatenated in `shard_names` order.
        `source` is the one of all rows, or has one value a row."""

    def rows_of_kind(
        self, source: int | NDArray[np.int64], kind: Kind, numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Sample numbers of the n-th samples of a kind, counted over the same shards; `source` as
        above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """The packs of one window. Pack k holds items item_offsets[k]:item_offsets[k+1]."""

    lane: int
    window: int
    pack_length: int
    align: int = 1
    """As PlanSettings.align."""
    item_offsets: NDArray[np.int64]
    # one value an item
    source: NDArray[np.int64]
    row: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    total_tokens: NDArray[np.int64]
    """Of the whole sample, at its planned image sizes."""
    kept_images: NDArray[np.int64]
    """The first of the sample's images that stand before `stop`."""
    image_limit: NDArray[np.int64]
    """The max_pixels, or max_tiles, of each of the item's images: the phase's, or less where they
    were shrunk."""
    # one value a pack
    tokens: NDArray[np.int64]
    """Without filler behind documents."""
    image_tokens: NDArray[np.int64]
    num_images: NDArray[np.int64]
    num_patches: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    cost: NDArray[np.int64]
    counts: NDArray[np.int64]
    """[reason of REASONS, source number] samples."""

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
    phase: int
    pack_length: int
    pack_number: NDArray[np.int64]
    """Global pack number, -1 for padding packs."""
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
    sync_cost: int
    """Largest sum, over sync domains, of their micro-steps' costliest cells."""
    sync_bound: int
    end_cost: int
    """Largest total of a rank."""
    end_bound: int
    moved: int
    """Packs on a rank that is not on their home node (homes of -1 not counted)."""
    moved_bound: int
    moved_bytes: int
    moved_bytes_bound: int
    given_up: NDArray[np.int64]
    """By source number: samples that a phase gave up just before this step, at a cut or, with
    remainder: drop, as a rest too short for a step."""

    @property
    def num_packs(self) -> int:
        return len(self.lane)

    @property
    def total_loss_tokens(self) -> int:
        return int(self.loss_tokens.sum())

    def pack_id(self, i: int) -> str:
        if self.lane[i] < 0:
            return padding_id(self.pack_length)
        return f"{self.lane[i]}.{self.window[i]}.{self.number[i]}"
