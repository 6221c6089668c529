"""Milliseconds of a resize into patches beside stock Pillow's resize alone, on one core.

`python benchmarks/resample.py`. Both take turns in one thread; a figure is the median of its runs
in CPU time of the thread. Pictures are noise, as bytes in memory; pixels are compared before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numba
import numpy as np
import PIL
from figures import Figure, machine, show, show_reached
from PIL import Image

from dataservice.pipeline.resampling import prepare_patches, resample

CASES = {
    "4 MP to 1 MP": (2000, 2000, 1008, 980),
    "1.8 MP to 0.9 MP": (1200, 1500, 840, 1036),
    "16 MP to 1 MP": (4000, 4000, 980, 1008),
    "0.12 MP to 0.11 MP": (400, 300, 392, 280),
    "0.36 MP to 1 MP": (600, 600, 1008, 1008),
}
"""Width and height before and after."""
PATCH, MERGE = 14, 2
LEAST_RATIO = 5.0
"""Of the first case."""


def timed(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def measured(size: tuple[int, int, int, int], runs: int) -> tuple[float, float]:
    """Median seconds of Pillow's resize, and of ours with the patches in their place."""
    width, height, new_width, new_height = size
    rng = np.random.Generator(np.random.Philox(width))
    pixels = rng.integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    out = np.zeros((new_width * new_height // PATCH**2, 3 * PATCH**2), np.uint8)

    def theirs() -> Image.Image:
        return image.resize((new_width, new_height), Image.Resampling.BICUBIC)

    def ours() -> None:
        prepare_patches(pixels, new_width, new_height, patch=PATCH, merge=MERGE)(out)

    assert (resample(pixels, new_width, new_height) == np.asarray(theirs())).all()
    ours()
    pairs = [(timed(theirs), timed(ours)) for _ in range(runs)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    print(f"machine:  {machine()}")
    print(
        f"versions: Python {sys.version.split()[0]}, pillow {PIL.__version__}, "
        f"numba {numba.__version__}, numpy {np.__version__}"
    )
    print(f"command:  python benchmarks/resample.py --runs {runs}\n")
    figures = []
    for name, size in CASES.items():
        pillow_s, ours_s = measured(size, runs)
        first = name == next(iter(CASES))
        figures.append(
            Figure(
                name=f"{name}: faster than Pillow",
                value=pillow_s / ours_s,
                unit="times",
                target=f"{LEAST_RATIO:g} and more" if first else "",
                reached=pillow_s / ours_s >= LEAST_RATIO if first else None,
                note=f"Pillow {pillow_s * 1e3:.2f} ms, ours with the patches {ours_s * 1e3:.2f} ms",
            )
        )
        show(figures[-1])
    return 0 if show_reached(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
