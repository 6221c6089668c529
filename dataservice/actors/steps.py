"""A planned step while its packs are being built and handed out.

Invariants: the placement never changes once made; only the worker of a pack may.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataservice.actors.holes import hole_key, parts_of
from dataservice.actors.pack_specs import spec_of
from dataservice.actors.plan_messages import PlannedStep
from dataservice.core.exclusions import EXCLUDED
from dataservice.core.packspec import TOKEN_BYTES
from dataservice.core.settings import Grid
from dataservice.core.suspicion import Suspicion
from dataservice.wire.messages import CursorState, PackPlace, StepCells

HEADER_BYTES = 4096


class ActiveStep:
    def __init__(
        self, cursor: CursorState, planned: PlannedStep, grid: Grid, *, patch_bytes: int
    ) -> None:
        self.cursor = cursor
        self.planned = planned
        self.grid = grid
        self.micro_step = np.frombuffer(planned.micro_step, dtype="<i8")
        self.dp_rank = np.frombuffer(planned.dp_rank, dtype="<i8")
        self.numbers = np.frombuffer(planned.number, dtype="<i8")
        """Global pack numbers, -1 for padding packs."""
        self.lane = np.frombuffer(planned.lane, dtype="<i8")
        self.cost = np.frombuffer(planned.cost, dtype="<i8")
        self.num_images = np.frombuffer(planned.num_images, dtype="<i8")
        patches = np.frombuffer(planned.num_patches, dtype="<i8")
        self.tokens = np.frombuffer(planned.tokens, dtype="<i8")
        self._size_bytes = HEADER_BYTES + self.tokens * TOKEN_BYTES + patches * patch_bytes
        num_packs = len(self.micro_step)
        self.worker: list[str | None] = [None] * num_packs
        """Id of the worker that builds pack i."""
        self.orphaned = False
        """Whether some packs have no worker because there was none."""
        self.suspicions: dict[int, Suspicion] = {}
        """Of packs that a worker may have been building when it ended without a word."""
        cell = self.micro_step * grid.dp_size + self.dp_rank
        self.order: list[int] = np.argsort(cell, kind="stable").tolist()
        """Packs by (micro-step, rank): the order of need."""
        num_cells = grid.dp_size * grid.micro_steps
        counts = np.bincount(cell, minlength=num_cells)
        self._cell_starts: list[int] = [0, *np.cumsum(counts).tolist()]
        self.images = self.cells(self.num_images)
        """int64 [micro_step, rank]."""
        self._ranks_without_images = tuple((self.images == 0).sum(axis=1).tolist())
        real = self.numbers >= 0
        room = int(real.sum()) * planned.settings.pack_length
        self.fill = round(int(self.tokens[real].sum()) / room, 6) if room else None
        """Tokens of its packs over their room, 0..1, without padding packs; None: no others."""
        self._marks = np.frombuffer(planned.sample_marks, dtype="<u4")
        counts = np.frombuffer(planned.sample_counts, dtype="<i8")
        self._mark_starts = np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def _by_id(self) -> dict[str, int]:
        return {pack_id: i for i, pack_id in enumerate(self.planned.pack_ids)}

    @property
    def step(self) -> int:
        return self.cursor.step

    def number(self, i: int) -> int:
        """Global pack number, -1 for a padding pack."""
        return int(self.numbers[i])

    def find(self, pack_id: str) -> int | None:
        return self._by_id.get(pack_id)

    def size_bytes(self, i: int) -> int:
        return int(self._size_bytes[i])

    def sample_marks(self, i: int) -> list[int]:
        """`pack_specs.sample_mark` of each sample of pack i, at hand without its spec."""
        marks: list[int] = self._marks[self._mark_starts[i] : self._mark_starts[i + 1]].tolist()
        return marks

    def sample_keys(self, i: int) -> list[str]:
        """Of the samples of pack i."""
        return [item.key for item in spec_of(self.planned.specs[i]).items]

    def hole_keys(self, i: int) -> list[str]:
        """Of all that pack i is made of: its records and their pictures."""
        keys: dict[str, None] = {}
        for item in spec_of(self.planned.specs[i]).items:
            keys[hole_key(item.key, None)] = None
            keys.update((hole_key(item.key, number), None) for number in range(len(item.images)))
        return list(keys)

    def excluded(self, i: int) -> dict[str, str]:
        """Hole key to reason, of the samples of pack i that are left out on purpose."""
        keys = self.planned.excluded.get(self.planned.pack_ids[i], ())
        return dict.fromkeys(keys, EXCLUDED)

    def place_of(self, i: int, hole_key: str) -> tuple[str, str]:
        """(member, archive) of a picture of pack i; empty for a record."""
        sample, number = parts_of(hole_key)
        spec = spec_of(self.planned.specs[i])
        for item in spec.items:
            if item.key == sample and number is not None and number < len(item.images):
                image = item.images[number]
                return image.member, spec.shards[image.shard].name
        return "", ""

    def cells(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [micro_step, rank]: sums of one value a pack."""
        cells = np.zeros((self.grid.micro_steps, self.grid.dp_size), dtype=np.int64)
        np.add.at(cells, (self.micro_step, self.dp_rank), values)
        return cells

    def packs_of_cell(self, micro_step: int, dp_rank: int) -> list[int]:
        cell = micro_step * self.grid.dp_size + dp_rank
        return self.order[self._cell_starts[cell] : self._cell_starts[cell + 1]]

    def cells_of(
        self, dp_rank: int, endpoint_of: Callable[[str | None], str | None]
    ) -> StepCells | None:
        """None while a pack of this rank has no live worker. `endpoint_of` a worker's id."""
        cells: list[tuple[PackPlace, ...]] = []
        for micro_step in range(self.grid.micro_steps):
            places: list[PackPlace] = []
            for i in self.packs_of_cell(micro_step, dp_rank):
                endpoint = endpoint_of(self.worker[i])
                if endpoint is None:
                    return None
                places.append(
                    PackPlace(
                        pack_id=self.planned.pack_ids[i],
                        number=self.number(i),
                        endpoint=endpoint,
                        size_bytes=self.size_bytes(i),
                    )
                )
            cells.append(tuple(places))
        return StepCells(
            step=self.step,
            cursor=self.cursor,
            next_cursor=self.planned.next_cursor,
            cells=tuple(cells),
            settings=self.planned.settings,
            next_step=self.planned.next_step,
            loss_tokens=self.planned.loss_tokens,
            num_images=tuple(self.images[:, dp_rank].tolist()),
            ranks_without_images=self._ranks_without_images,
        )
