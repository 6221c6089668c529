"""Which samples the windows of one lane take, in one phase: a range of positions of each source.

Invariants: integer arithmetic only; ranges of successive windows follow each other without a gap,
from phase to phase too. In an endless run a lane has taken of a source its exact share rounded
down, over any number of windows and phases. In a finite run no window mixes two epochs, and after
epoch e a lane has taken floor(size * repeat * (e + 1) + lane / lanes): exactly `repeat` times each
sample where that is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from dataservice.core.order import MixedOrder, SourceOrder

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSource:
    number: int
    """In the index."""
    order: SourceOrder
    share: Fraction
    """Of the samples of a window."""
    repeat: Fraction
    """Times an epoch reads it; 0 in an endless run."""
    taken: Fraction
    """Samples that the phases before take of it, in an endless run."""


class LaneMix:
    """Thread-safe; a call costs what its window holds."""

    def __init__(
        self,
        sources: Sequence[MixedSource],
        order: MixedOrder,
        *,
        lane: int,
        num_lanes: int,
        window_samples: int,
        first_window: int,
        windows_per_epoch: int | None,
    ) -> None:
        self._sources = sources
        self._lane = lane
        self._num_lanes = num_lanes
        self._first_window = first_window
        self._windows_per_epoch = windows_per_epoch
        self._order = order
        self._sizes = [source.order.lane_size(lane) for source in sources]
        self._numbers = np.array([source.number for source in sources], dtype=np.int64)
        self._rates = [
            _rate(source, size, num_lanes * window_samples)
            for source, size in zip(sources, self._sizes, strict=True)
        ]
        """By source (begin, rate, unit): (begin + rate * w) // unit positions come before window w
        of the phase."""
        self.windows_to_read_all = max(
            (
                -(-size * unit // rate) + 1
                for size, (_, rate, unit) in zip(self._sizes, self._rates, strict=True)
                if size
            ),
            default=0,
        )
        """Windows after which each sample of the lane has been read at least once; 0 with none."""

    def spans(self, window: int) -> list[tuple[int, int]]:
        """By source: first position and one past the last that a window of the phase takes."""
        turn = window - self._first_window
        if self._windows_per_epoch is None:
            return [
                ((begin + rate * turn) // unit, (begin + rate * (turn + 1)) // unit)
                for begin, rate, unit in self._rates
            ]
        return self._spans_of_epoch(*divmod(window, self._windows_per_epoch))

    def samples(self, window: int) -> tuple[Ints, Ints]:
        """(source number, sample number in it) of a window's samples, source by source."""
        spans = self.spans(window)
        counts = [stop - first for first, stop in spans]
        return np.repeat(self._numbers, counts), self._order.rows(self._lane, spans)

    def add_samples(self, windows: range, counts: Ints) -> None:
        """Adds to `counts`, by source number, what windows of the phase take together."""
        if windows:
            first, last = self.spans(windows[0]), self.spans(windows[-1])
            taken = [stop - begin for (begin, _), (_, stop) in zip(first, last, strict=True)]
            counts[self._numbers] += np.array(taken, dtype=np.int64)

    def _spans_of_epoch(self, epoch: int, turn: int) -> list[tuple[int, int]]:
        spans = []
        for source, size, (_, rate, unit) in zip(
            self._sources, self._sizes, self._rates, strict=True
        ):
            begin = self._epoch_start(source, size, epoch)
            if turn + 1 == self._windows_per_epoch:
                stop = self._epoch_start(source, size, epoch + 1)
            else:
                stop = begin + (turn + 1) * rate // unit
            spans.append((begin + turn * rate // unit, stop))
        return spans

    def _epoch_start(self, source: MixedSource, size: int, epoch: int) -> int:
        """floor(size * repeat * epoch + lane / lanes)"""
        times, unit = source.repeat.numerator, source.repeat.denominator
        lanes = self._num_lanes
        return (size * times * epoch * lanes + self._lane * unit) // (unit * lanes)


def _rate(source: MixedSource, size: int, samples: int) -> tuple[int, int, int]:
    """For a window of `samples` in all lanes together."""
    unit = lcm(source.share.denominator, source.taken.denominator)
    begin = source.taken.numerator * (unit // source.taken.denominator)
    rate = samples * source.share.numerator * (unit // source.share.denominator)
    return begin * size, rate * size, unit * source.order.num_samples
