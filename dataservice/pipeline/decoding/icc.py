"""Colours by a picture's ICC profile -> sRGB, relative colorimetric.

Invariants: a profile that is damaged, above 4 MiB, or of other colours than the picture's changes
nothing; the alpha channel is kept as it is.
"""

from __future__ import annotations

import functools
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from dataservice.pipeline.decoding.raster import Raster

MAX_PROFILE_BYTES = 4 * 1024**2
_CACHED = 16
"""Transforms kept, with their profiles; cameras and programs share a few."""


def usable(profile: object) -> bytes:
    """Those bytes; empty for what is no profile or too large to be one."""
    return profile if isinstance(profile, bytes) and len(profile) <= MAX_PROFILE_BYTES else b""


def applied(raster: Raster) -> Raster:
    """The picture in sRGB; itself when it has no profile that fits it."""
    if not raster.profile:
        return raster
    channels = raster.samples.shape[2]
    transform = _to_srgb(raster.profile, "L" if channels <= 2 else "RGB")
    if transform is None:
        return raster
    if channels <= 2:
        colours = Image.fromarray(np.ascontiguousarray(raster.samples[:, :, 0]))
    else:
        colours = Image.fromarray(np.ascontiguousarray(raster.samples[:, :, :3]))
    rgb = transform.apply(colours)
    samples: NDArray[np.uint8] = np.asarray(rgb)
    if raster.has_alpha:
        samples = np.concatenate([samples, raster.samples[:, :, -1:]], axis=2)
    return Raster(samples=samples, has_alpha=raster.has_alpha, scale=raster.scale)


def from_cmyk(image: Image.Image, profile: bytes) -> Image.Image | None:
    """A picture of mode CMYK in sRGB; None when the profile does not fit."""
    transform = _to_srgb(profile, "CMYK")
    return None if transform is None else transform.apply(image)


@functools.lru_cache(_CACHED)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    try:
        return ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return None
