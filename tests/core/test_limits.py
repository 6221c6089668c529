"""Settings beyond what can be planned are refused by name, value and maximum."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dataservice.core.cost import sample_cost
from dataservice.core.limits import LARGEST, MAX_STEP_PACKS, exact_fraction
from dataservice.core.plan.check import check_settings, kind_grids
from dataservice.core.settings import (
    BalanceSettings,
    Grid,
    KindShare,
    Phase,
    PlanSettings,
    Segregation,
)
from dataservice.core.vision import VisionRules
from dataservice.errors import ConfigError

PLAN = {field.name for field in dataclasses.fields(PlanSettings(sources=()))}


def refused(words: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(PlanSettings(sources=(), **changes))


@pytest.mark.parametrize("name", sorted(PLAN & set(LARGEST)))
def test_every_count_of_the_plan_has_a_maximum(name: str) -> None:
    values = {"pack_length": LARGEST["pack_length"], name: LARGEST[name]}
    check_settings(PlanSettings(sources=(), **values))
    refused(f"plan: {name} is {LARGEST[name] + 1}; it must be at most", **{name: LARGEST[name] + 1})


def test_phases_kinds_vision_and_balance_have_maxima_too() -> None:
    huge = 10**30
    refused(r"phases\[0\]: packs is 1", phases=(Phase(packs=huge), Phase()))
    refused(r"phases\[0\]: max_pixels is 1", phases=(Phase(max_pixels=huge),))
    share = KindShare(micro_steps=1)
    many = KindShare(micro_steps=1, packs_per_cell=huge)
    refused("vision: packs_per_cell is 1", segregate=Segregation(text=share, vision=many))
    refused("vision: max_pixels is 1", vision=VisionRules(max_pixels=huge))
    refused("patches of 1 x 1 pixels", vision=VisionRules(patch=1, max_pixels=1 << 32))
    refused("vision: max_tiles is 1", vision=VisionRules(mode="tiles", max_tiles=huge))
    refused("vision: tile_tokens is 1", vision=VisionRules(mode="tiles", tile_tokens=huge))
    fine = VisionRules(mode="tiles", patch=1, tile=1024, max_tiles=64)
    refused("max_tiles is 64, 68,157,440 patches of 1 x 1", vision=fine)
    refused("min_images_per_rank is 1", balance=BalanceSettings(min_images_per_rank=huge))


def test_tiles_that_cannot_be_cut_are_refused() -> None:
    tiles = VisionRules(mode="tiles")
    refused(
        "tile is 450; it must be a multiple of patch, 14",
        vision=dataclasses.replace(tiles, tile=450),
    )
    refused(
        "min_tiles is 7; it must be at most",
        vision=dataclasses.replace(tiles, min_tiles=7, max_tiles=6),
    )
    refused("tile is 0", vision=dataclasses.replace(tiles, tile=0))
    refused("mode is 'slices'", vision=dataclasses.replace(tiles, mode="slices"))
    phase = Phase(windows=1, max_tiles=3)
    refused(
        "max_tiles is 3, less than vision.min_tiles 4",
        vision=dataclasses.replace(tiles, min_tiles=4),
        phases=(phase, Phase()),
    )
    refused("max_pixels is 9, which says nothing", vision=tiles, phases=(Phase(max_pixels=9),))


def test_a_step_has_a_maximum_of_packs() -> None:
    most = Grid(dp_size=MAX_STEP_PACKS, micro_steps=1)
    assert kind_grids(PlanSettings(sources=()), most) == (most,)
    with pytest.raises(ConfigError, match=r"packs a step, more than 131,072"):
        kind_grids(PlanSettings(sources=()), Grid(dp_size=MAX_STEP_PACKS, micro_steps=2))
    share = KindShare(micro_steps=1, packs_per_cell=MAX_STEP_PACKS)
    segregated = PlanSettings(sources=(), segregate=Segregation(text=share, vision=share))
    with pytest.raises(ConfigError, match="segregate is 262144 packs a step"):
        kind_grids(segregated, Grid(dp_size=1, micro_steps=2))


@pytest.mark.parametrize("text", ["1e999999999", "1E-0_0999", "1e100", "9" * 101])
def test_numbers_that_take_too_long_are_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="should have"):
        exact_fraction(text)
    refused("llm_vit_ratio is .* should have", llm_vit_ratio=text)


@pytest.mark.parametrize("text", ["1e99", "1e-99", "0.3", "1/3", "12345678901234567890/7"])
def test_numbers_of_sensible_size_are_read(text: str) -> None:
    assert exact_fraction(text) > 0


def test_costs_that_add_up_to_too_much_are_refused() -> None:
    values = np.full(3, 1 << 40, dtype=np.int64)
    with pytest.raises(ConfigError, match="p_ref"):
        sample_cost(
            "vit_cost",
            num_patches=values,
            patches_squared=values,
            image_tokens=values,
            length=values,
            p_ref=1 << 24,
            fitted=None,
        )
