"""Walking the packs of one stream in global order, from any place.

Invariants: packs come by (index in lane, lane), lanes that have ended skipped; only a lane that
gives a pack moves, so the place after g packs is the same however the walk was cut; windows are
asked for only when a pack of theirs is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from dataservice.core.tables import WindowPlan

Ints = NDArray[np.int64]

NextPack = Callable[[int, int, int], tuple[WindowPlan, int] | None]
"""(lane, window, offset) -> the window that holds the lane's next pack, and its number there."""
Prepare = Callable[[list[tuple[int, int]]], None]
"""Told the (lane, window) places that are asked for next; it may plan them side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenPacks:
    """int64 [M] each, one value a pack, in global order."""

    lane: Ints
    window: Ints
    number: Ints
    tokens: Ints
    image_tokens: Ints
    num_images: Ints
    num_patches: Ints
    loss_tokens: Ints
    cost: Ints

    def padded(self, count: int) -> TakenPacks:
        """With `count` padding packs at the end: lane, window and number -1, everything else 0."""
        padding = TakenPacks(
            **{
                field.name: np.full(
                    count, -1 if field.name in ("lane", "window", "number") else 0, dtype=np.int64
                )
                for field in fields(self)
            }
        )
        return joined([self, padding])


def joined(parts: Sequence[TakenPacks]) -> TakenPacks:
    """One after the other."""
    return TakenPacks(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(TakenPacks)
        }
    )


class Walk:
    """`places` and `next_lane` are where it stands, `taken` how many packs it gave so far."""

    def __init__(
        self,
        places: Sequence[tuple[int, int]],
        next_lane: int,
        next_pack: NextPack,
        prepare: Prepare,
    ) -> None:
        self.places = list(places)
        self.next_lane = next_lane
        self.taken = 0
        self._next_pack = next_pack
        self._prepare = prepare

    def take(self, count: int) -> TakenPacks:
        """The next `count` packs, or what is left."""
        windows: list[WindowPlan] = []
        slot_of: dict[tuple[int, int], int] = {}
        slots: list[Ints] = []
        numbers: list[Ints] = []
        left = count
        while left and (turn := self._turn(left)):
            # Whole rounds over the lanes of this turn until the first of their windows is used up.
            rounds = min(planned.num_packs - offset for planned, offset in turn)
            rounds = max(1, min(rounds, left // len(turn)))
            here = []
            for planned, offset in turn:
                key = (planned.lane, planned.window)
                if key not in slot_of:
                    slot_of[key] = len(windows)
                    windows.append(planned)
                here.append(slot_of[key])
                self._move(planned, offset + rounds)
            offsets = np.array([offset for _, offset in turn], dtype=np.int64)
            slots.append(np.tile(np.array(here, dtype=np.int64), rounds))
            numbers.append((np.arange(rounds, dtype=np.int64)[:, None] + offsets).ravel())
            left -= rounds * len(turn)
            self.next_lane = (turn[-1][0].lane + 1) % len(self.places)
        self.taken += count - left
        none = np.zeros(0, dtype=np.int64)
        return _gather(windows, np.concatenate([none, *slots]), np.concatenate([none, *numbers]))

    def _turn(self, most: int) -> list[tuple[WindowPlan, int]]:
        """The next pack of up to `most` lanes, in order; fewer only if the others have ended."""
        turn: list[tuple[WindowPlan, int]] = []
        lanes = len(self.places)
        soon = [(self.next_lane + i) % lanes for i in range(min(most, lanes))]
        self._prepare([(lane, self.places[lane][0]) for lane in soon])
        for i in range(lanes):
            if len(turn) == most:
                break
            lane = (self.next_lane + i) % lanes
            found = self._next_pack(lane, *self.places[lane])
            if found is not None:
                turn.append(found)
        return turn

    def _move(self, planned: WindowPlan, offset: int) -> None:
        used_up = offset == planned.num_packs
        place = (planned.window + 1, 0) if used_up else (planned.window, offset)
        self.places[planned.lane] = place


def _gather(windows: list[WindowPlan], slots: Ints, numbers: Ints) -> TakenPacks:
    sizes = [planned.num_packs for planned in windows]
    first = np.cumsum([0, *sizes], dtype=np.int64)
    where = first[slots] + numbers

    def column(values: list[Ints]) -> Ints:
        chosen: Ints = np.concatenate([np.zeros(0, dtype=np.int64), *values])[where]
        return chosen

    return TakenPacks(
        lane=np.array([planned.lane for planned in windows], dtype=np.int64)[slots],
        window=np.array([planned.window for planned in windows], dtype=np.int64)[slots],
        number=numbers,
        tokens=column([planned.tokens for planned in windows]),
        image_tokens=column([planned.image_tokens for planned in windows]),
        num_images=column([planned.num_images for planned in windows]),
        num_patches=column([planned.num_patches for planned in windows]),
        loss_tokens=column([planned.loss_tokens for planned in windows]),
        cost=column([planned.cost for planned in windows]),
    )
