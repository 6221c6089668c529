"""The first picture of a file as Pillow reads it, whatever the format.

Invariants: only the formats named here are tried; what is damaged is an ImageError, never half a
picture; samples of 16 bits become round(v / 257); CMYK of a JPEG is read as Adobe writes it
(inverted). Importing this module switches off Pillow's own size limit and its warnings: both are
replaced by the checks of `headers`.
"""

from __future__ import annotations

import importlib
import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, ImageFile

from dataservice.errors import ImageError
from dataservice.pipeline.decoding import icc
from dataservice.pipeline.decoding.png_chunks import check_rows
from dataservice.pipeline.decoding.raster import Raster
from dataservice.pipeline.decoding.whole_jpeg import WholeJpeg
from dataservice.storage.probe import ImageHeader
from dataservice.storage.probe.reasons import in_words

Image.MAX_IMAGE_PIXELS = None
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a decode thread has its core for itself alone
warnings.filterwarnings("ignore", module=r"PIL\.")

_MODULES = {
    "AVIF": "Avif",
    "BMP": "Bmp",
    "GIF": "Gif",
    "JPEG": "Jpeg",
    "JPEG2000": "Jpeg2K",
    "PNG": "Png",
    "PPM": "Ppm",
    "TIFF": "Tiff",
    "WEBP": "WebP",
}
for _module in _MODULES.values():
    importlib.import_module(f"PIL.{_module}ImagePlugin")
FORMATS = tuple(name for name in _MODULES if name in Image.OPEN)
"""What is tried; Pillow knows more, among them formats that start other programs."""

_WHITE_IS_ZERO, _PHOTOMETRIC = 0, 262
_IN_PYTHON = frozenset(("ppm", "ppm_plain", "bmp_rle"))
"""Pillow's decoders of rare forms of PPM and BMP, which hold the GIL: 1 to 4 us a pixel."""
_MAX_SLOW_PIXELS, _MAX_SLOW_BYTES, _MAX_COMMENTS = 4_000_000, 48_000_000, 10_000
"""Of a picture for one of them; a comment in a plain PPM costs it up to 50 us."""


def load(data: bytes, header: ImageHeader, profile: bytes | None) -> Raster:
    """The picture as it is stored, but for a TIFF, which Pillow turns. Raises ImageError.

    `data`: of a PNG and a JPEG without what says nothing of the pixels. `profile`: the picture's
    ICC profile, empty where none is wanted; None asks Pillow for it.
    """
    name = header.format
    try:
        with _open(data, name) as image:
            if image.size not in ((header.width, header.height), (header.height, header.width)):
                raise other_size(image.size, header)
            _check_slow(data, image)
            image.load()
            if name == "PNG":
                check_rows(data, image)
            if profile is None:
                profile = icc.usable(image.info.get("icc_profile"))
            return _raster(image, data[24] if name == "PNG" else 8, profile)
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # Pillow raises nearly anything on damaged files
        raise ImageError(_sentence(name, error)) from error


def other_size(size: tuple[int, int], header: ImageHeader) -> ImageError:
    """For (width, height) that are not the header's."""
    return ImageError(
        f"corrupt {header.format}: {size[0]}x{size[1]} pixels, "
        f"its header says {header.width}x{header.height}"
    )


def _check_slow(data: bytes, image: ImageFile.ImageFile) -> None:
    if not image.tile or image.tile[0][0] not in _IN_PYTHON:
        return
    what = f"{image.width}x{image.height} in {len(data)} bytes of a rare form of {image.format}"
    if image.width * image.height > _MAX_SLOW_PIXELS or len(data) > _MAX_SLOW_BYTES:
        raise ImageError(
            f"too many pixels: {what}, the limits are {_MAX_SLOW_PIXELS} and {_MAX_SLOW_BYTES}"
        )
    if image.tile[0][0] == "ppm_plain" and data.count(b"#") > _MAX_COMMENTS:
        raise ImageError(f"corrupt {image.format}: more than {_MAX_COMMENTS} comments")


def _open(data: bytes, name: str) -> ImageFile.ImageFile:
    # A JPEG not through Image.open, which looks for further pictures behind the first.
    return WholeJpeg(data) if name == "JPEG" else Image.open(io.BytesIO(data), formats=(name,))


def _raster(image: Image.Image, bits: int, profile: bytes) -> Raster:
    """`bits`: of a PNG's sample, as its header says."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return _from_16_bits(image, profile)
    if image.mode in ("I", "F"):
        raise ImageError(f"unsupported format: {image.format} with samples of 32 bits")
    transparent = image.info.get("transparency")
    if transparent is not None and image.mode in ("L", "RGB"):
        image.info["transparency"] = _to_8_bits(transparent, bits)
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        return Raster(samples=np.asarray(rgba), has_alpha=True, profile=profile)
    if image.mode in ("1", "L"):
        gray = np.asarray(image.convert("L"))
        return Raster(samples=gray[:, :, np.newaxis], profile=profile)
    if image.mode == "CMYK" and profile:
        applied = icc.from_cmyk(image, profile)
        return Raster(samples=np.asarray(applied or image.convert("RGB")))
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return Raster(samples=np.asarray(rgb), profile=profile)


def _from_16_bits(image: Image.Image, profile: bytes) -> Raster:
    values = np.asarray(image)
    gray = to_8_bits(values)
    tags = getattr(image, "tag_v2", {})
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        gray = 255 - gray
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return Raster(samples=gray[:, :, np.newaxis], profile=profile)
    alpha = np.where(values == transparent, np.uint8(0), np.uint8(255))
    return Raster(samples=np.stack([gray, alpha], axis=2), has_alpha=True, profile=profile)


def to_8_bits(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """round(v / 257) of samples of 16 bits, of any integer type, clipped to that range."""
    return ((np.clip(values, 0, 0xFFFF).astype(np.uint32) + 128) // 257).astype(np.uint8)


def _to_8_bits(value: int | tuple[int, ...], bits: int) -> int | tuple[int, ...]:
    """A transparent colour, in the file's bits, as the pixels of that colour read."""
    if isinstance(value, tuple):
        return tuple(part >> 8 if bits == 16 else part & 0xFF for part in value)
    top = (1 << bits) - 1
    return (value & top) * 255 // top if bits < 8 else value & 0xFF


def _sentence(name: str, error: Exception) -> str:
    text = in_words(error)
    if isinstance(error, NotImplementedError) or text.startswith("unsupported"):
        return f"unsupported format: {name}: {text.removeprefix('unsupported: ')}"
    return f"{'truncated' if 'truncated' in text.lower() else 'corrupt'} {name}: {text}"
