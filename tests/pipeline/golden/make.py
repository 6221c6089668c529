"""Writes the golden files: what transformers' PIL image processors make of the cases.

Run in an environment of its own with transformers and stock Pillow (no torch is needed), once with
Pillow 12 and once with 13: `python tests/pipeline/golden/make.py`. Invariants: a file is a function
of the cases and of both libraries alone; it names their versions.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from pipeline.golden.cases import (
    PROCESSORS,
    REFUSED,
    SIZES,
    WHOLE_PATCHES,
    Processor,
    levels,
    picture,
    sides,
    stored_in,
)


def derived(case: Processor) -> dict[str, np.ndarray]:
    """What a golden file holds, by name.

    For each picture "<width>x<height>.": grid int64 [3], patches_sha256 and values_sha256; of small
    ones patches uint8 [P, 3 * patch**2] too. "levels.values" float32 [P, 3 * temporal * patch**2]
    of the picture with every byte, not resized; "grids" int64 [N, 2] (rows, columns) of `sides()`,
    -1 where refused; "versions".
    """
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": case.min_pixels, "longest_edge": case.max_pixels},
        patch_size=case.patch,
        merge_size=case.merge,
        temporal_patch_size=case.temporal_patch,
        image_mean=list(case.mean_std[0]),
        image_std=list(case.mean_std[1]),
    )
    found: dict[str, np.ndarray] = {
        "versions": np.array(f"transformers {transformers.__version__}, pillow {PIL.__version__}"),
        "grids": np.array([_grid(case, *size) for size in sides()]),
    }
    for size in SIZES:
        image = Image.fromarray(picture(*size))
        values, grid = _run(processor, image)
        repeated, _ = _run(processor, image, do_rescale=False, do_normalize=False)
        by_time = repeated.reshape(len(repeated), 3, case.temporal_patch, case.patch**2)
        assert (by_time == by_time[:, :, :1].astype(np.uint8)).all() and values.dtype == np.float32
        patches = by_time[:, :, 0].astype(np.uint8).reshape(len(repeated), -1)
        name = f"{size[0]}x{size[1]}."
        found[name + "grid"] = grid
        found[name + "patches_sha256"] = _digest(patches)
        found[name + "values_sha256"] = _digest(values)
        if len(patches) <= WHOLE_PATCHES:
            found[name + "patches"] = patches
    side = 2 * case.patch * case.merge
    found["levels.values"], _ = _run(processor, Image.fromarray(levels(side)), do_resize=False)
    for size in REFUSED:
        assert _grid(case, *size) == (-1, -1)
    return found


def _run(processor: Any, image: Image.Image, **options: bool) -> tuple[np.ndarray, np.ndarray]:
    made = processor(images=[image], return_tensors="np", **options)
    return made["pixel_values"], made["image_grid_thw"][0]


def _grid(case: Processor, width: int, height: int) -> tuple[int, int]:
    try:
        rows, columns = smart_resize(
            height, width, case.patch * case.merge, case.min_pixels, case.max_pixels
        )
    except ValueError:
        return -1, -1
    return rows // case.patch, columns // case.patch


def _digest(values: np.ndarray) -> np.ndarray:
    return np.array(hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest())


if __name__ == "__main__":
    for name, case in PROCESSORS.items():
        path = stored_in(int(PIL.__version__.partition(".")[0]), name)
        path.parent.mkdir(exist_ok=True)
        np.savez_compressed(path, **derived(case))
