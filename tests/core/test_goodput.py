from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.packing.goodput import ReferenceGrid, window_time


def _grid(ranks: int, micro_steps: int, ratio: str = "1") -> ReferenceGrid:
    return ReferenceGrid(ranks=ranks, micro_steps=micro_steps, ratio=Fraction(ratio))


def _goodput(cost: list[int], heads: list[int], ratio: Fraction) -> Fraction:
    """Fill x (1 - idle), up to a constant of the samples."""
    mean = Fraction(sum(cost), len(cost))
    llm = ratio * mean
    return (llm + mean) / (llm + Fraction(sum(heads), len(heads))) / len(cost)


def test_rows_start_early_by_the_strays() -> None:
    grid = _grid(1024, 16)
    assert grid.row_start(0, 680) == 0
    assert grid.row_start(1, 680) == (1024 - 6) * 680 // (1024 * 16) == 42
    assert grid.row_start(15, 680) == (15 * 1024 - 6) * 680 // (1024 * 16) == 637


def test_a_grid_of_few_ranks_has_every_row_headed_by_the_costliest() -> None:
    assert _grid(3, 2).row_start(1, 100) == 0


def test_by_hand() -> None:
    """Rows of 100 of 200 packs, headed by the first and the 95th: (100 - 6) * 200 / 200."""
    cost = np.arange(200, 0, -1, dtype=np.int64)
    heads = 200 + (200 - 94)
    assert window_time(cost, _grid(100, 2, "3/2")) == 200 * (3 * 2 * cost.sum() + 2 * heads * 200)


def test_order_does_not_matter_and_nothing_costs_nothing() -> None:
    cost = np.array([5, 1, 9, 9, 2], dtype=np.int64)
    assert window_time(cost, _grid(8, 4)) == window_time(cost[::-1].copy(), _grid(8, 4))
    assert window_time(np.zeros(0, dtype=np.int64), _grid(8, 4)) == 0
    assert window_time(np.zeros(7, dtype=np.int64), _grid(8, 4)) == 0


@settings(deadline=None, max_examples=200)
@given(
    pieces=st.lists(st.integers(0, 1000), min_size=2, max_size=30),
    first=st.integers(1, 12),
    second=st.integers(1, 12),
    ranks=st.integers(1, 64),
    micro_steps=st.integers(1, 8),
    ratio=st.sampled_from(["0.2", "1/3", "1", "4.4", "20"]),
)
def test_less_time_is_more_goodput(
    pieces: list[int], first: int, second: int, ranks: int, micro_steps: int, ratio: str
) -> None:
    """Two ways to deal the same samples to packs compare as their goodputs do, exactly."""
    grid = _grid(ranks, micro_steps, ratio)
    times, goodputs = [], []
    for count in (first, second):
        cost = [sum(pieces[pack::count]) for pack in range(count)]
        falling = sorted(cost, reverse=True)
        heads = [falling[grid.row_start(row, count)] for row in range(micro_steps)]
        times.append(window_time(np.array(cost, dtype=np.int64), grid))
        goodputs.append(_goodput(cost, heads, grid.ratio) if sum(pieces) else Fraction(0))
    if sum(pieces):
        assert (times[0] < times[1]) == (goodputs[0] > goodputs[1])
        assert (times[0] == times[1]) == (goodputs[0] == goodputs[1])
    else:
        assert times == [0, 0]


def test_large_costs_are_exact() -> None:
    cost = np.full(1000, 1 << 50, dtype=np.int64)
    grid = _grid(4, 2, "1")
    assert window_time(cost, grid) == 1000 * (2 * 1000 * (1 << 50) + 2 * (1 << 50) * 1000)


@pytest.mark.parametrize("ratio", ["0.2", "20"])
def test_even_packs_beat_uneven_ones(ratio: str) -> None:
    grid = _grid(64, 4, ratio)
    even = np.full(400, 10, dtype=np.int64)
    uneven = np.concatenate([np.full(200, 1), np.full(200, 19)]).astype(np.int64)
    assert window_time(even, grid) <= window_time(uneven, grid)
