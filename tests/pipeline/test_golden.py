"""Patches, grids and normalised values are those of transformers' image processors, bit by bit."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import PIL
import pytest
import torch
from pipeline.golden.cases import (
    PROCESSORS,
    REFUSED,
    SIZES,
    Processor,
    levels,
    picture,
    sides,
    stored_in,
)

from dataservice.core.vision import target_size
from dataservice.pipeline.resampling import passes, prepare_patches
from trainer_client.batch import MicroBatch, VisionInfo
from trainer_client.device import normalize


@pytest.fixture(params=PROCESSORS)
def golden(request):
    """A processor's settings, and a function from Pillow's major version to what it makes."""

    @functools.cache
    def made(pillow: int) -> dict[str, np.ndarray]:
        with np.load(stored_in(pillow, request.param)) as stored:
            return dict(stored)

    return PROCESSORS[request.param], made


def planned(case: Processor, width: int, height: int) -> tuple[int, int]:
    return target_size(
        height,
        width,
        patch=case.patch,
        merge=case.merge,
        min_pixels=case.min_pixels,
        max_pixels=case.max_pixels,
    )


def patches_of(case: Processor, pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    out = np.zeros((height * width // case.patch**2, 3 * case.patch**2), np.uint8)
    prepare_patches(pixels, width, height, patch=case.patch, merge=case.merge)(out)
    return out


def values_of(case: Processor, patches: np.ndarray) -> np.ndarray:
    batch = MicroBatch(pixel_values=torch.from_numpy(patches))
    batch.vision = VisionInfo(
        patch=case.patch,
        merge=case.merge,
        temporal_patch=case.temporal_patch,
        mean=case.mean_std[0],
        std=case.mean_std[1],
    )
    return normalize(batch).numpy()


@pytest.mark.parametrize("pillow", [12, 13])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_pictures(golden, size, pillow, monkeypatch) -> None:
    case, made = golden
    stored = made(pillow)
    monkeypatch.setattr(passes, "_DOWN_FIRST", pillow >= 13)
    name = f"{size[0]}x{size[1]}."
    height, width = planned(case, *size)
    grid = [1, height // case.patch, width // case.patch]
    assert grid == stored[name + "grid"].tolist()
    patches = patches_of(case, picture(*size), height, width)
    if name + "patches" in stored:
        np.testing.assert_array_equal(patches, stored[name + "patches"])
    assert hashlib.sha256(patches.tobytes()).hexdigest() == stored[name + "patches_sha256"]
    values = values_of(case, patches)
    assert hashlib.sha256(values.tobytes()).hexdigest() == stored[name + "values_sha256"]


def test_normalised_values_of_every_byte(golden) -> None:
    case, made = golden
    stored = made(13)
    side = 2 * case.patch * case.merge
    patches = patches_of(case, levels(side), side, side)
    assert len(np.unique(patches)) == 256
    values, expected = values_of(case, patches), stored["levels.values"]
    assert values.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(values, expected)


def test_grids_of_many_sizes(golden) -> None:
    case, made = golden
    stored = made(13)
    assert len(stored["grids"]) == len(sides())
    for (width, height), expected in zip(sides(), stored["grids"].tolist(), strict=True):
        try:
            rows, columns = (side // case.patch for side in planned(case, width, height))
        except ValueError:
            rows = columns = -1
        assert [rows, columns] == expected, (width, height)


@pytest.mark.parametrize("size", REFUSED)
def test_extreme_aspect_ratios_are_refused(golden, size) -> None:
    with pytest.raises(ValueError, match="aspect ratio above 200"):
        planned(golden[0], *size)


@pytest.mark.slow
def test_golden_files_are_what_transformers_makes(golden) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from pipeline.golden.make import derived

    case, made = golden
    stored, now = made(int(PIL.__version__.partition(".")[0])), derived(case)
    assert now.keys() == stored.keys()
    for name in now.keys() - {"versions"}:
        np.testing.assert_array_equal(now[name], stored[name], err_msg=name)
