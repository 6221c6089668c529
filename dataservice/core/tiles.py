"""Into how many tiles a picture is cut, by InternVL's dynamic tiling, from its size alone.

Invariants: pure; the vectorised form equals the scalar one for every input. The rule is that of
`dynamic_preprocess` and `find_closest_aspect_ratio` in InternVL's published preprocessing: of all
grids of min_tiles to max_tiles tiles the one whose columns over rows are closest to the picture's
width over height; of equally close ones, taken by their number of tiles, the last of whose area
the picture's is more than half, else the first. Where even those have equally many tiles, the one
with fewer columns comes first, as in the processor that transformers has for InternVL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def tile_grid(
    height: int, width: int, *, tile: int, min_tiles: int, max_tiles: int
) -> tuple[int, int]:
    """(rows, columns) of tiles of `tile` pixels a side."""
    aspect, area = width / height, width * height
    closest, found = math.inf, (1, 1)
    for columns, rows in _grids(min_tiles, max_tiles):
        off = abs(aspect - columns / rows)
        if off < closest:
            closest, found = off, (rows, columns)
        elif off == closest and 2 * area > tile**2 * rows * columns:
            found = rows, columns
    return found


def tile_grids(
    height: Ints, width: Ints, *, tile: int, min_tiles: int, max_tiles: Ints | int
) -> tuple[Ints, Ints]:
    """`tile_grid` of many pictures, int64 [N] arrays in and out; `max_tiles` of all or of each."""
    if isinstance(max_tiles, int):
        return _closest(height, width, tile, _ratios(min_tiles, max_tiles))
    rows, columns = np.empty((2, len(height)), dtype=np.int64)
    for most in np.unique(max_tiles).tolist():
        own = max_tiles == most
        rows[own], columns[own] = tile_grids(
            height[own], width[own], tile=tile, min_tiles=min_tiles, max_tiles=most
        )
    return rows, columns


@lru_cache(maxsize=16)
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """(columns, rows) by number of tiles, then columns."""
    found = (
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    )
    return tuple(sorted(found, key=lambda grid: (grid[0] * grid[1], grid[0])))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ratios:
    """The aspect ratios of all grids, ascending, one value a ratio: its grids are the multiples
    `first` to `last` of the smallest one."""

    value: NDArray[np.float64]
    columns: Ints
    rows: Ints
    first: Ints
    last: Ints


@lru_cache(maxsize=256)
def _ratios(min_tiles: int, max_tiles: int) -> _Ratios:
    multiples: dict[tuple[int, int], list[int]] = {}
    for columns, rows in _grids(min_tiles, max_tiles):
        common = math.gcd(columns, rows)
        multiples.setdefault((columns // common, rows // common), []).append(common)
    ordered = sorted(multiples, key=lambda ratio: ratio[0] / ratio[1])
    columns, rows = np.array(ordered, dtype=np.int64).T
    return _Ratios(
        value=columns / rows,
        columns=columns,
        rows=rows,
        first=np.array([multiples[ratio][0] for ratio in ordered], dtype=np.int64),
        last=np.array([multiples[ratio][-1] for ratio in ordered], dtype=np.int64),
    )


def _closest(height: Ints, width: Ints, tile: int, ratios: _Ratios) -> tuple[Ints, Ints]:
    aspect = width / height
    above = np.minimum(np.searchsorted(ratios.value, aspect), len(ratios.value) - 1)
    below = np.maximum(above - 1, 0)
    off = np.abs(aspect - ratios.value[below]), np.abs(aspect - ratios.value[above])
    # the most tiles of a grid of whose area a picture's is more than half
    room = (2 * height * width - 1) // tile**2
    low, high = _multiple(ratios, below, room), _multiple(ratios, above, room)
    take_high = off[1] < off[0]
    tied = off[1] == off[0]
    if tied.any():
        take_high |= tied & _comes_last(ratios, (below, low), (above, high), room)
    number = np.where(take_high, above, below)
    times = np.where(take_high, high, low)
    return ratios.rows[number] * times, ratios.columns[number] * times


def _multiple(ratios: _Ratios, number: Ints, room: Ints) -> Ints:
    """Of the grids of a ratio the largest of at most `room` tiles, else the first."""
    first, last = ratios.first[number], ratios.last[number]
    smallest = ratios.columns[number] * ratios.rows[number]
    found = first.copy()
    for times in range(2, int(ratios.last.max()) + 1):
        found[(first < times) & (times <= last) & (smallest * times**2 <= room)] = times
    return found


def _comes_last(
    ratios: _Ratios, low: tuple[Ints, Ints], high: tuple[Ints, Ints], room: Ints
) -> NDArray[np.bool_]:
    """Whether `high`, (number of the ratio, multiple), is chosen of two equally close grids."""
    (low_columns, low_tiles), (high_columns, high_tiles) = (
        (ratios.columns[number] * times, ratios.columns[number] * ratios.rows[number] * times**2)
        for number, times in (low, high)
    )
    later = (high_tiles > low_tiles) | ((high_tiles == low_tiles) & (high_columns > low_columns))
    low_fits, high_fits = low_tiles <= room, high_tiles <= room
    chosen: NDArray[np.bool_] = np.where(
        low_fits & high_fits, later, high_fits | (~low_fits & ~later)
    )
    return chosen
