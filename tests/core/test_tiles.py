"""The grid of tiles, against InternVL's published rule; and what a plan makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internvl import closest_grid

from dataservice.core.tiles import tile_grid, tile_grids
from dataservice.core.vision import (
    VisionRules,
    image_tokens,
    num_patches,
    num_rows,
    planned_size,
    planned_sizes,
    squared,
    tokens_of,
)

# (height, width) -> (rows, columns), 448 pixels, 1 to 12 tiles
KNOWN = {
    (448, 448): (1, 1),
    (634, 634): (2, 2),  # of equally close grids the last that it has over half the area of
    (633, 633): (1, 1),
    (1000, 1000): (3, 3),
    (480, 640): (3, 4),
    (1080, 1920): (2, 4),  # 16:9 lies between 3:2 and 2:1
    (800, 1200): (2, 3),
    (1, 200): (1, 12),
    (3000, 20): (12, 1),
    (800, 1400): (2, 4),  # 7:4 is as far from 3:2 as from 2:1: 1 x 2, 2 x 3 and 2 x 4 in turn
    (600, 1050): (2, 3),
    (100, 175): (1, 2),
}


@pytest.mark.parametrize(("size", "expected"), KNOWN.items())
def test_known_grids(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert tile_grid(*size, tile=448, min_tiles=1, max_tiles=12) == expected


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """Half of them of a ratio of small numbers, where grids are equally close."""
    if draw(st.booleans()):
        return draw(st.integers(1, 5000)), draw(st.integers(1, 5000))
    scale = draw(st.integers(1, 400))
    return scale * draw(st.integers(1, 14)), scale * draw(st.integers(1, 14))


RANGES = st.tuples(st.integers(1, 6), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))


@settings(deadline=None, max_examples=150)
@given(
    pairs=st.lists(sizes(), min_size=1, max_size=12), limits=RANGES, tile=st.sampled_from([56, 448])
)
def test_both_forms_are_the_published_rule(
    pairs: list[tuple[int, int]], limits: tuple[int, int], tile: int
) -> None:
    least, most = limits
    high, wide = np.array(pairs, dtype=np.int64).T
    rows, columns = tile_grids(high, wide, tile=tile, min_tiles=least, max_tiles=most)
    for i, (height, width) in enumerate(pairs):
        found = tile_grid(height, width, tile=tile, min_tiles=least, max_tiles=most)
        expected = closest_grid(width, height, min_num=least, max_num=most, image_size=tile)
        assert found == expected[::-1]
        assert (rows[i], columns[i]) == found
        assert least <= found[0] * found[1] <= most


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(sizes(), min_size=1, max_size=8), data=st.data())
def test_each_picture_may_have_its_own_limit(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    limits = data.draw(st.lists(st.integers(1, 20), min_size=len(pairs), max_size=len(pairs)))
    high, wide = np.array(pairs, dtype=np.int64).T
    rows, columns = tile_grids(high, wide, tile=448, min_tiles=1, max_tiles=np.array(limits))
    for i, ((height, width), most) in enumerate(zip(pairs, limits, strict=True)):
        found = tile_grid(height, width, tile=448, min_tiles=1, max_tiles=most)
        assert (rows[i], columns[i]) == found


@settings(deadline=None, max_examples=60)
@given(size=sizes(), least=st.integers(1, 4))
def test_a_lower_limit_never_gives_more_tiles(size: tuple[int, int], least: int) -> None:
    counts = [
        rows * columns
        for most in range(least, 21)
        for rows, columns in [tile_grid(*size, tile=448, min_tiles=least, max_tiles=most)]
    ]
    assert counts == sorted(counts)


# ---- in the rules -------------------------------------------------------------------------------

TILES = VisionRules(mode="tiles")


def test_a_picture_of_several_tiles_has_a_thumbnail() -> None:
    assert planned_size(480, 640, TILES) == (3 * 448, 4 * 448)
    for size, tiles in (((448, 448), 1), ((1344, 1792), 13)):
        assert num_rows(*size, TILES) == tiles
        assert num_patches(*size, TILES) == tiles * 1024
        assert image_tokens(*size, TILES) == tiles * 256
    without = VisionRules(mode="tiles", thumbnail=False)
    assert num_rows(1344, 1792, without) == 12


def test_a_tile_attends_alone() -> None:
    patches = np.array([1024, 13 * 1024])
    assert squared(patches, TILES).tolist() == [1024**2, 13 * 1024**2]
    assert squared(patches, VisionRules()).tolist() == [1024**2, (13 * 1024) ** 2]


def test_bytes_of_pixels_follow_from_patches() -> None:
    for rules, patches in ((TILES, 13 * 1024), (VisionRules(), 52)):
        rows, values = rules.pixel_shape(patches)
        assert rows * values == patches * rules.patch_bytes
    assert TILES.pixel_shape(13 * 1024) == (13, 3 * 448 * 448)


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.lists(sizes(), min_size=1, max_size=8),
    thumbnail=st.booleans(),
    most=st.integers(1, 15),
    data=st.data(),
)
def test_planned_sizes_are_those_of_single_pictures(
    pairs: list[tuple[int, int]], thumbnail: bool, most: int, data: st.DataObject
) -> None:
    usable = [(h, w) for h, w in pairs if max(h, w) <= 200 * min(h, w)]
    limit = data.draw(st.lists(st.integers(1, most), min_size=len(usable), max_size=len(usable)))
    rules = VisionRules(mode="tiles", tile=28, patch=14, thumbnail=thumbnail, max_tiles=most)
    high, wide = np.array(usable, dtype=np.int64).reshape(-1, 2).T
    for own in (None, np.array(limit, dtype=np.int64)):
        heights, widths = planned_sizes(high, wide, rules, own)
        tokens = image_tokens(heights, widths, rules)
        assert (tokens == tokens_of(num_patches(heights, widths, rules), rules)).all()
        for i, size in enumerate(usable):
            planned = planned_size(*size, rules, None if own is None else limit[i])
            assert (heights[i], widths[i]) == planned
            tiles = planned[0] * planned[1] // 28**2
            tiles += thumbnail and tiles > 1
            assert num_rows(*planned, rules) == tiles
            assert tokens[i] == 256 * tiles


def test_extreme_pictures_are_refused_as_in_the_other_mode() -> None:
    with pytest.raises(ValueError, match="aspect ratio above 200"):
        planned_size(1, 201, TILES)
    with pytest.raises(ValueError, match="picture 1 of"):
        planned_sizes(np.array([20, 1]), np.array([20, 201]), TILES)
