"""Decodes one picture, so that what is compiled once an environment is there before anything runs.

python -m peers.warm
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from peers.decoders import ours
from peers.work import RULES


def main() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), np.uint8)
    for size in ((2000, 1500), (500, 300)):
        file = io.BytesIO()
        Image.fromarray(pixels).resize(size).save(file, "JPEG")
        for exact in (True, False):
            picture = ours(exact=exact)(file.getvalue())
            picture.write(np.empty((picture.num_patches, RULES.patch_bytes), np.uint8))


if __name__ == "__main__":
    main()
