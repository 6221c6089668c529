"""Where the packs that the ranks have read are computed, from a table that every rank has.

Invariants: it follows from the table and the settings alone, in whole numbers, so every rank finds
the same; a pack stays where it was read unless balance needs it elsewhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSettings:
    """As `dataservice.core.balance.assign` takes them; the grid is one of `dp_size` ranks."""

    dp_size: int
    micro_steps: int
    packs_per_cell: int = 1
    ranks_per_node: int = 1
    sync_domain: int | None = None
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("micro_steps", "packs_per_cell", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("ranks_per_node", "sync_domain"):
            value = getattr(self, name)
            if value is not None and (value < 1 or self.dp_size % value):
                raise ConfigError(f"{name} is {value}, must divide the {self.dp_size} ranks")

    @property
    def packs_per_rank(self) -> int:
        """That each rank reads for a global batch."""
        return self.micro_steps * self.packs_per_cell

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Column(IntEnum):
    """Of a pack's row in the table."""

    COST = 0
    IMAGES = 1
    LABELLED = 2
    """Tokens with a label."""
    PAYLOAD_BYTES = 3
    HEADER_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Pack p was read by rank p // packs_per_rank, or is padding that rank `padding_from` makes."""

    cells: Ints
    """[micro_steps, dp_size, packs_per_cell]: pack numbers."""
    origin: Ints
    """[M]: the rank that has each pack."""
    columns: Ints
    """[M, len(Column)], those of padding filled in."""
    num_images: Ints
    """[micro_steps, dp_size]"""

    def sent(self, micro_step: int, rank: int) -> list[list[int]]:
        """For each rank, the packs of a micro-step that it gets from `rank`, in their order."""
        cells = self.cells[micro_step]
        to, which = np.nonzero((self.origin[cells] == rank) & (self._ranks != rank))
        packs: list[list[int]] = [[] for _ in cells]
        for receiver, pack in zip(to.tolist(), cells[to, which].tolist(), strict=True):
            packs[receiver].append(pack)
        return packs

    def received(self, micro_step: int, rank: int) -> list[list[int]]:
        """For each rank, the packs of a micro-step that `rank` gets from it."""
        packs: list[list[int]] = [[] for _ in self.cells[micro_step]]
        for pack in self.cells[micro_step, rank].tolist():
            if self.origin[pack] != rank:
                packs[self.origin[pack]].append(pack)
        return packs

    def moves(self, micro_step: int) -> bool:
        """Whether any pack of a micro-step has to be sent."""
        return bool((self.origin[self.cells[micro_step]] != self._ranks).any())

    @property
    def _ranks(self) -> Ints:
        return np.arange(self.cells.shape[1], dtype=np.int64)[:, None]


def place(counts: Ints, columns: Ints, padding: Ints, settings: PlacementSettings) -> Placement:
    """`counts` [dp_size]: packs read; `columns` [dp_size, packs_per_rank, len(Column)] of them;
    `padding` [dp_size, len(Column)]: of the padding pack that each rank would make.

    What is missing is padding of the lowest rank that has read a pack.
    """
    from dataservice.core.balance import assign  # it loads numba, where that is there

    per_rank = settings.packs_per_rank
    read = np.arange(per_rank) < counts[:, None]
    maker = int(np.flatnonzero(counts)[0])
    filled = np.where(read[:, :, None], columns, padding[maker]).reshape(-1, len(Column))
    ranks = np.repeat(np.arange(settings.dp_size, dtype=np.int64), per_rank)
    flat = read.reshape(-1)
    placed = assign(
        filled[:, Column.COST],
        np.where(flat, ranks // settings.ranks_per_node, -1),
        dp_size=settings.dp_size,
        micro_steps=settings.micro_steps,
        ranks_per_node=settings.ranks_per_node,
        sync_domain=settings.sync_domain,
        tolerance=settings.tolerance,
        packs_per_cell=settings.packs_per_cell,
    )
    cells = np.lexsort((np.arange(len(flat)), placed.dp_rank, placed.micro_step)).reshape(
        settings.micro_steps, settings.dp_size, settings.packs_per_cell
    )
    return Placement(
        cells=cells.astype(np.int64),
        origin=np.where(flat, ranks, maker),
        columns=filled,
        num_images=filled[cells, Column.IMAGES].sum(axis=2),
    )
