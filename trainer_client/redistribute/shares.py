"""What one rank reads of each global batch, and the numbers by which the other ranks know it.

Invariants: an error of the source or of the cost is kept, not raised, until all ranks have been
told; the numbers of a share have the same shape on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ConfigError
from trainer_client.batch import IGNORE, MicroBatch
from trainer_client.cost_terms import P_REF, cost_terms
from trainer_client.redistribute import flat
from trainer_client.redistribute.joining import padding_like
from trainer_client.redistribute.placement import Column

Cost = Callable[[MicroBatch], int]


COSTS_BELOW = 2**61
"""What the planner adds up costs to."""


class Fact(IntEnum):
    """Numbers of a rank that come before those of its packs."""

    FAILED = 0
    PACKS = 1
    STEP = 2
    MICRO_STEP = 3
    """With which it begins; not 0 only where it was resumed inside a step."""
    SOURCE_STEP = 4
    """-1 unless its packs are its share of a whole step of the source."""
    SOURCE_LOSS_TOKENS = 5


def vision_cost(pack: MicroBatch) -> int:
    """The planner's `vit_cost` of a pack: the sum over its images of p * (4096 + p), p patches."""
    if not hasattr(pack, "vision"):
        raise ConfigError(
            "cost is not given, and the source yields no micro-batches of a PackStream; give "
            "cost=, a function from a pack to a whole number"
        )
    terms = cost_terms(pack)
    return P_REF * terms["patches"] + terms["patches_squared"]


@dataclass(kw_only=True)
class Share:
    """Packs of one rank for one global batch; those that were handed on are None."""

    state_before: Any
    """Of the source."""
    packs: list[MicroBatch | None] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    """[packs][len(Column)]"""
    headers: list[bytes] = field(default_factory=list)
    source_step: int = -1
    source_loss_tokens: int = -1
    padding: MicroBatch | None = None
    """That this rank makes where packs are missing, as `numbers` told the others."""
    ended: bool = False
    error: Exception | None = None


def padding_of(share: Share) -> MicroBatch:
    """A new padding pack of a share whose numbers were told."""
    assert share.padding is not None
    return padding_like(share.padding)


class SourceReader:
    """Reads shares of `packs_per_rank` packs, one after the other, some packs at a time."""

    def __init__(
        self, source: Iterable[Any], *, cost: Cost, packs_per_rank: int, pads: bool
    ) -> None:
        self._source, self._cost = source, cost
        self._packs_per_rank, self._pads = packs_per_rank, pads
        self._items: Iterator[Any] | None = None
        self._padding: MicroBatch | None = None

    def begin(self) -> Share:
        """The share that follows; nothing of it has been read."""
        state = getattr(self._source, "state_dict", None)
        return Share(state_before=None if state is None else copy.deepcopy(state()))

    def read(self, share: Share, count: int) -> None:
        """Up to `count` more packs, until the share is whole, the source ends or an error."""
        for _ in range(min(count, self._packs_per_rank - len(share.packs))):
            if share.ended or share.error is not None:
                return
            try:
                self._read_one(share)
            except Exception as error:  # told to all ranks, then raised by this one
                share.error = error

    def numbers(self, share: Share, facts: dict[Fact, int]) -> NDArray[np.int64]:
        """int64 [len(Fact) + (1 + packs_per_rank) * len(Column)]: padding's row is the first."""
        facts = facts | {
            Fact.FAILED: int(share.error is not None),
            Fact.PACKS: len(share.packs),
            Fact.SOURCE_STEP: share.source_step,
            Fact.SOURCE_LOSS_TOKENS: share.source_loss_tokens,
        }
        rows = np.zeros((1 + self._packs_per_rank, len(Column)), np.int64)
        share.padding = self._padding
        if self._padding is not None:
            rows[0] = _columns(self._padding, 0, flat.describe(self._padding))
        if share.rows:
            rows[1 : 1 + len(share.rows)] = share.rows
        return np.concatenate([np.array([facts[fact] for fact in Fact], np.int64), rows.ravel()])

    def _read_one(self, share: Share) -> None:
        if self._items is None:
            self._items = iter(self._source)
        item = next(self._items, None)
        if item is None:
            share.ended = True
            return
        pack = flat.as_micro_batch(item)
        header = flat.describe(pack)
        cost = self._cost(pack)
        is_whole = isinstance(cost, (int, np.integer)) and not isinstance(cost, bool)
        if not is_whole or not 0 <= cost < COSTS_BELOW:
            raise ConfigError(
                f"cost is {cost!r} for a pack; it must be a whole number from 0 to below 2**61, "
                "such as microseconds"
            )
        if self._pads:
            known = self._padding
            if known is None or len(known["input_ids"]) != len(pack.get("input_ids", ())):
                self._padding = padding_like(pack)
        self._note_step(share, pack)
        share.rows.append(_columns(pack, int(cost), header))
        share.headers.append(header)
        share.packs.append(pack)

    def _note_step(self, share: Share, pack: MicroBatch) -> None:
        number = len(share.packs)
        if number == 0 and pack.micro_step == 0 and "loss_tokens" in pack.meta:
            share.source_step = pack.step
            share.source_loss_tokens = pack.meta["loss_tokens"]
        is_last = number + 1 == self._packs_per_rank
        if pack.step != share.source_step or pack.is_last_micro_step != is_last:
            share.source_step = share.source_loss_tokens = -1


def _columns(pack: MicroBatch, cost: int, header: bytes) -> list[int]:
    row = [0] * len(Column)
    row[Column.COST] = cost
    row[Column.IMAGES] = len(pack.get("image_grid_thw", ()))
    row[Column.LABELLED] = int((pack["labels"] != IGNORE).sum()) if "labels" in pack else 0
    row[Column.PAYLOAD_BYTES] = flat.payload_bytes(pack)
    row[Column.HEADER_BYTES] = len(header)
    return row
