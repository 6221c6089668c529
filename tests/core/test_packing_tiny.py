"""Tiny windows and grids in plain Python, where a read outside an array raises."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.uncompiled import printed_by

from dataservice.core.cost import sum_groups
from dataservice.core.packing import Packing, PackRules, pack
from dataservice.core.settings import Packer

Ints = NDArray[np.int64]

GRIDS = ((1, 1), (1, 2), (2, 1), (7, 2), (8, 2), (8, 4), (9, 4), (64, 2))
PACK_LENGTH = 32
CASES = 600

cap = st.none() | st.integers(1, 12)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Ints, Ints, Ints]:
    """(length, images, cost) of 0 to 70 samples."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    count = draw(st.integers(0, 70))
    length = rng.integers(draw(st.sampled_from((1, PACK_LENGTH // 2, 30, 32))), 33, count)
    images = rng.integers(0, 4, count) * (rng.random(count) < draw(st.sampled_from((0.1, 0.5, 1))))
    kind = draw(st.sampled_from(("images", "any", "huge", "none", "one")))
    cost = {
        "images": images,
        "any": rng.integers(0, 100, count) ** 3,
        "huge": rng.integers(0, 1 << 40, count),
        "none": images * 0,
        "one": 4 * (np.arange(count) == count // 2),
    }[kind]
    return length.astype(np.int64), images.astype(np.int64), cost.astype(np.int64)


def checked(length: Ints, images: Ints, cost: Ints, **rules: Any) -> Packing:
    given_rules = PackRules(**{"pack_length": PACK_LENGTH, **rules})
    found = pack(length, images * 3, images * 12, images, cost, given_rules, seed=1)
    assert sorted(found.order.tolist()) == list(range(len(length)))
    assert (np.diff(found.offsets) > 0).all()
    assert (sum_groups(length[found.order], found.offsets) <= given_rules.pack_length).all()
    with_images = sum_groups((images[found.order] > 0).astype(np.int64), found.offsets)
    for name, use in (("image_token_cap", images * 3), ("image_cap", images)):
        if (most := rules.get(name)) is not None:
            above = sum_groups(use[found.order], found.offsets) > most
            assert (with_images[above] == 1).all()
    return found


@settings(deadline=None, max_examples=CASES, derandomize=True, database=None)
@given(
    columns=columns(),
    packer=st.sampled_from((*get_args(Packer), "balanced", "balanced", "balanced")),
    grid=st.sampled_from(GRIDS),
    open_bins=st.integers(1, 5),
    image_token_cap=cap,
    image_cap=cap,
)
def every_window_packs(
    columns: tuple[Ints, Ints, Ints], packer: Packer, grid: tuple[int, int], **rules: Any
) -> None:
    ranks, micro_steps = grid
    checked(
        *columns,
        packer=packer,
        reference_ranks=ranks,
        reference_micro_steps=micro_steps,
        **rules,
    )


def full_texts_and_an_image(count: int) -> tuple[Ints, Ints, Ints]:
    """All but the first cost nothing, so the mean pack costs less than one."""
    first = (np.arange(count) == 0).astype(np.int64)
    return np.full(count, PACK_LENGTH), first, first * 4


def nearly_full(count: int) -> tuple[Ints, Ints, Ints]:
    """A pack each, of seven costs."""
    length = np.full(count, PACK_LENGTH)
    length[::3] -= 2
    return length, np.zeros(count, dtype=np.int64), np.arange(count) % 7 * 1000


@pytest.mark.parametrize("grid", [*GRIDS, (1024, 16)])
@pytest.mark.parametrize("window", [full_texts_and_an_image(400), nearly_full(40)])
def test_windows_with_little_to_even_out(
    grid: tuple[int, int], window: tuple[Ints, Ints, Ints]
) -> None:
    found = checked(
        *window, packer="balanced", reference_ranks=grid[0], reference_micro_steps=grid[1]
    )
    assert found.num_packs == len(window[0])


def in_plain_python() -> None:
    every_window_packs()
    for grid in GRIDS:
        for window in (nearly_full(40), full_texts_and_an_image(60)):
            test_windows_with_little_to_even_out(grid, window)


def test_no_read_outside_an_array() -> None:
    code = "from tests.core.test_packing_tiny import in_plain_python\nin_plain_python()"
    assert printed_by(code) == ""


@pytest.mark.parametrize("packer", ["best_fit", "budget_2d", "nbin"])
def test_more_open_bins_than_samples_are_not_made(packer: Packer) -> None:
    window = nearly_full(40)
    many, enough = (checked(*window, packer=packer, open_bins=bins) for bins in (10**9, 40))
    assert many.order.tobytes() == enough.order.tobytes()
    assert many.offsets.tobytes() == enough.offsets.tobytes()
