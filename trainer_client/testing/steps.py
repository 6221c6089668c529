"""What a FakeService serves, step by step; and packs of a list, dealt to the cells in its order.

Invariants: a step follows from its cursor and the grid alone; a pack from its id alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.core.settings import Grid
from dataservice.wire.messages import CursorState, SessionOpened, StepSettings
from trainer_client.testing.synthetic import FakePack, padding_pack

Ints = NDArray[np.int64]
Placement = Callable[[Ints, Grid], tuple[NDArray[Any], NDArray[Any]]]
"""(cost int64[M], grid) -> (micro_step[M], dp_rank[M])."""


def arrival_order(cost: Ints, grid: Grid) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pack i to micro-step i // (R*k), rank (i // k) % R."""
    cell = np.arange(len(cost)) // grid.packs_per_cell
    return cell // grid.dp_size, cell % grid.dp_size


def balanced(cost: Ints, grid: Grid) -> tuple[NDArray[Any], NDArray[Any]]:
    """As the service places packs by default (`dataservice.core.balance.assign`)."""
    from dataservice.core.balance import assign

    placed = assign(
        cost,
        np.full(len(cost), -1),
        dp_size=grid.dp_size,
        micro_steps=grid.micro_steps,
        packs_per_cell=grid.packs_per_cell,
    )
    return placed.micro_step, placed.dp_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeStep:
    """One step of a grid; of its M packs one value each."""

    cursor: CursorState
    next_cursor: CursorState
    settings: StepSettings
    next_step: StepSettings | None
    """Of the step behind it; None: this one is the last."""
    pack_ids: tuple[str, ...]
    numbers: Ints
    """Global pack numbers, -1 for padding packs."""
    micro_step: NDArray[Any]
    dp_rank: NDArray[Any]
    num_images: Ints
    size_bytes: Ints
    loss_tokens: int
    """Planned, of all packs."""

    def images(self, grid: Grid) -> Ints:
        """[micro-step, rank]: images of each cell."""
        found = np.zeros((grid.micro_steps, grid.dp_size), np.int64)
        np.add.at(found, (self.micro_step, self.dp_rank), self.num_images)
        return found


class PackSource(Protocol):
    info: SessionOpened
    """What every session is told; `session` and what is told of the first step are not looked
    at."""

    def start(self) -> CursorState: ...

    def step(self, cursor: CursorState, grid: Grid) -> FakeStep | None:
        """None at the end. Raises ConfigError for a grid, ResumeRefused for a cursor that it
        cannot serve."""

    def pack(self, pack_id: str) -> FakePack: ...


class ListedPacks:
    """A list of packs, in its order; `drop_remainder`: the last ones that fill no step are left
    out, else padding packs fill it."""

    def __init__(
        self,
        packs: Sequence[FakePack],
        *,
        placement: Placement,
        drop_remainder: bool,
        info: SessionOpened,
    ) -> None:
        self.info = info
        self._packs = list(packs)
        self._placement, self._drop_remainder = placement, drop_remainder
        self._padding = padding_pack(info)
        grids = [pack.arrays["image_grid_thw"] for pack in self._packs]
        self._largest = max((int(grid.prod(axis=1).max(initial=0)) for grid in grids), default=0)
        """Rows of the largest picture, its thumbnail not counted."""

    def start(self) -> CursorState:
        return CursorState(
            step=0,
            phase=0,
            phase_digest=self.info.plan_digest,
            next_pack=(0,),
            lanes=((0, 0),),
            next_lane=(0,),
            lane_homes=(-1,),
        )

    def step(self, cursor: CursorState, grid: Grid) -> FakeStep | None:
        first = cursor.next_pack[0]
        if not self._has_step(first, grid):
            return None
        stop = min(first + grid.num_packs, len(self._packs))
        numbers = np.full(grid.num_packs, -1)
        numbers[: stop - first] = range(first, stop)
        packs = [self._packs[i] if i >= 0 else self._padding for i in numbers]
        cost = np.array([pack.cost for pack in packs], np.int64)
        micro_step, dp_rank = self._placement(cost, grid)
        settings = self._settings(grid)
        return FakeStep(
            cursor=cursor,
            next_cursor=replace(
                cursor, step=cursor.step + 1, next_pack=(stop,), lanes=((0, stop),)
            ),
            settings=settings,
            next_step=settings if self._has_step(stop, grid) else None,
            pack_ids=tuple(
                f"0.0.{number}" if number >= 0 else f"pad.{self.info.pack_length}"
                for number in numbers.tolist()
            ),
            numbers=numbers,
            micro_step=micro_step,
            dp_rank=dp_rank,
            num_images=np.array([pack.num_images for pack in packs]),
            size_bytes=np.array([pack.size_bytes for pack in packs]),
            loss_tokens=sum(pack.loss_tokens for pack in packs),
        )

    def pack(self, pack_id: str) -> FakePack:
        if pack_id.startswith("pad."):
            return self._padding
        return self._packs[int(pack_id.split(".")[2])]

    def _has_step(self, first: int, grid: Grid) -> bool:
        left = len(self._packs) - first
        return left >= grid.num_packs if self._drop_remainder else left > 0

    def _settings(self, grid: Grid) -> StepSettings:
        tiles = self.info.tile > 0
        return StepSettings(
            pack_length=self.info.pack_length,
            num_packs=(grid.packs_per_cell,) * grid.micro_steps,
            max_pixels=0 if tiles else self._largest * self.info.patch**2,
            max_tiles=self._largest if tiles else 0,
        )
