"""A planned step while its packs are being built and handed out.

Invariants: the placement never changes once made; only the worker of a pack may.
"""

from __future__ import annotations

import numpy as np

from dataservice.actors.holes import hole_key, parts_of
from dataservice.actors.plan_messages import PlannedStep
from dataservice.core.exclusions import EXCLUDED
from dataservice.core.packspec import TOKEN_BYTES, PackSpec
from dataservice.core.settings import Grid
from dataservice.core.suspicion import Suspicion
from dataservice.wire.messages import CursorState, PackPlace, StepCells
from dataservice.wire.schema import decode

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
        self.suspicions: dict[int, Suspicion] = {}
        """Of packs that a worker had not finished when it ended without a word."""
        self.order = np.lexsort((np.arange(num_packs), self.dp_rank, self.micro_step))
        """Packs by (micro-step, rank): the order of need."""
        cell = self.micro_step[self.order] * grid.dp_size + self.dp_rank[self.order]
        starts = np.searchsorted(cell, np.arange(grid.dp_size * grid.micro_steps + 1))
        self._in_order: list[int] = self.order.tolist()
        self._cell_starts: list[int] = starts.tolist()
        images = np.zeros((grid.micro_steps, grid.dp_size), dtype=np.int64)
        np.add.at(images, (self.micro_step, self.dp_rank), self.num_images)
        self._images = images
        self._sample_keys: dict[int, list[str]] = {}
        self._by_id = {pack_id: i for i, pack_id in enumerate(planned.pack_ids)}

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

    def sample_keys(self, i: int) -> list[str]:
        """Of the samples of pack i; read from its spec when they are first asked for."""
        if i not in self._sample_keys:
            spec = decode(PackSpec, self.planned.specs[i])
            self._sample_keys[i] = [item.key for item in spec.items]
        return self._sample_keys[i]

    def hole_keys(self, i: int) -> list[str]:
        """Of all that pack i is made of: its records and their pictures."""
        keys: dict[str, None] = {}
        for item in decode(PackSpec, self.planned.specs[i]).items:
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
        spec = decode(PackSpec, self.planned.specs[i])
        for item in spec.items:
            if item.key == sample and number is not None and number < len(item.images):
                image = item.images[number]
                return image.member, spec.shards[image.shard].name
        return "", ""

    def packs_of_cell(self, micro_step: int, dp_rank: int) -> list[int]:
        cell = micro_step * self.grid.dp_size + dp_rank
        return self._in_order[self._cell_starts[cell] : self._cell_starts[cell + 1]]

    def cells_of(self, dp_rank: int, endpoints: dict[str, str]) -> StepCells | None:
        """None while a pack of this rank has no live worker. `endpoints`: worker id -> endpoint."""
        cells: list[tuple[PackPlace, ...]] = []
        for micro_step in range(self.grid.micro_steps):
            places: list[PackPlace] = []
            for i in self.packs_of_cell(micro_step, dp_rank):
                endpoint = endpoints.get(self.worker[i] or "")
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
            num_images=tuple(int(n) for n in self._images[:, dp_rank]),
            ranks_without_images=tuple(int(n) for n in (self._images == 0).sum(axis=1)),
        )
