"""The bytes of a picture file -> its first picture, upright, in RGB.

Invariants: size, format and turn come from `storage.probe`, so that what is served has the size
that was indexed, and nothing is decoded when they are refused; every failure is an ImageError whose
reason is a sentence for people, the same each time. What is transparent lies over white; samples of
16 bits become round(v / 257); CMYK of a JPEG is read as Adobe writes it (inverted); ICC profiles
are not applied; metadata is not believed and never costs the picture: text and profiles of a PNG
are not even read. Importing this module switches off Pillow's own size limit and its warnings: both
are replaced by the checks here.
"""

from __future__ import annotations

import importlib
import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataservice.errors import ImageError
from dataservice.pipeline.jpegs import CheckedJpeg
from dataservice.pipeline.pngs import bare_png, check_rows
from dataservice.storage.probe import ImageHeader, probe
from dataservice.storage.probe.reasons import in_words

Image.MAX_IMAGE_PIXELS = None
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

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WHITE = (255, 255, 255)
_ANIMATED = 0x02
_ANIMATION_COST = 4
"""Times the memory of a still picture that the first picture of an animated WebP takes."""
_WHITE_IS_ZERO, _PHOTOMETRIC = 0, 262
_MAX_SCANS = 300
"""Of a JPEG of the most pixels that are allowed; a smaller one may have more. An empty scan costs
0.05 ns a pixel, so that no file takes longer than about 3 s for its scans alone."""
_SCAN_BYTES = 10
"""The least that a scan takes in a file."""


def planned_header(data: bytes, width: int, height: int, max_pixels: int) -> ImageHeader:
    """The header of a picture that the index has in that upright size. Raises ImageError.

    In a compressed archive the index does not look behind a PNG's pixels, where its orientation
    may stand; the picture is turned as the index has it.
    """
    header = picture_header(data, max_pixels)
    if (header.width, header.height) != (width, height) and header.format == "PNG":
        header = picture_header(data, max_pixels, look_behind=False)
    if (header.width, header.height) != (width, height):
        raise ImageError(
            f"{header.format} is {header.width}x{header.height} pixels upright, "
            f"the index says {width}x{height}"
        )
    return header


def picture_header(data: bytes, max_pixels: int, *, look_behind: bool = True) -> ImageHeader:
    """Upright size, format and turn. Raises ImageError, also when it has more than `max_pixels`.

    `look_behind`: whether an orientation behind the pixels counts.
    """
    header = probe(
        lambda offset, size: data[offset : offset + size],
        len(data),
        head=data,
        look_behind=look_behind,
    )
    if header.format not in FORMATS:
        raise ImageError(f"unsupported format: {header.format}")
    num_pixels = header.width * header.height
    what, most = header.format, max_pixels
    if header.format == "WEBP" and data[12:16] == b"VP8X" and data[20] & _ANIMATED:
        what, most = "animated WEBP", max_pixels // _ANIMATION_COST
    if num_pixels > most:
        raise ImageError(
            f"too many pixels: {what} of {header.width}x{header.height}, the limit is {most}"
        )
    if header.format == "JPEG":
        _check_scans(data, header, max_pixels)
    return header


def _check_scans(data: bytes, header: ImageHeader, max_pixels: int) -> None:
    most = _MAX_SCANS * max_pixels // (header.width * header.height)
    if len(data) // _SCAN_BYTES <= most:
        return
    scans = data.count(b"\xff\xda")
    if scans > most:
        raise ImageError(
            f"too many pixels: JPEG of {header.width}x{header.height} in {scans} scans"
        )


def load_rgb(data: bytes, header: ImageHeader) -> Image.Image:
    """The picture upright, mode RGB, of the header's size. Raises ImageError."""
    name = header.format
    if name == "WEBP" and int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise ImageError(f"truncated {name}: its header says more bytes than the file has")
    try:
        with _open(data, name) as image:
            if image.size != (header.height, header.width):
                _check_size(image.size, header)
            image.load()
            if name == "PNG":
                check_rows(data, image)
            rgb = _rgb(image, _sample_bits(data, name))
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # Pillow raises nearly anything on damaged files
        raise ImageError(_sentence(name, error)) from error
    turn = _TURNS.get(header.orientation)
    upright = rgb if turn is None else rgb.transpose(turn)
    _check_size(upright.size, header)
    return upright


def _check_size(size: tuple[int, int], header: ImageHeader) -> None:
    if size != (header.width, header.height):
        raise ImageError(
            f"corrupt {header.format}: {size[0]}x{size[1]} pixels, "
            f"its header says {header.width}x{header.height}"
        )


def _open(data: bytes, name: str) -> Image.Image:
    # A JPEG not through Image.open, which looks for further pictures behind the first.
    if name == "JPEG":
        return CheckedJpeg(data)
    return Image.open(io.BytesIO(bare_png(data) if name == "PNG" else data), formats=(name,))


def _sample_bits(data: bytes, name: str) -> int:
    """Of a PNG, as its header says; 8 for the others."""
    return data[24] if name == "PNG" else 8


def _rgb(image: Image.Image, bits: int) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise ImageError(f"unsupported format: {image.format} with samples of 32 bits")
    transparent = image.info.get("transparency")
    if transparent is not None and image.mode in ("L", "RGB"):
        image.info["transparency"] = _to_8_bits(transparent, bits)
    if image.has_transparency_data:
        return _over_white(image if image.mode == "RGBA" else image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    alpha = image.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return image.convert("RGB")
    rgb = Image.new("RGB", image.size, _WHITE)
    rgb.paste(image, mask=alpha)
    return rgb


def _from_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    gray = to_8_bits(values)
    tags = getattr(image, "tag_v2", {})
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        gray = 255 - gray
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return Image.fromarray(gray).convert("RGB")


def to_8_bits(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """round(v / 257) of samples of 16 bits, of any integer type, clipped to that range."""
    return ((np.clip(values, 0, 0xFFFF).astype(np.uint32) + 128) // 257).astype(np.uint8)


def _to_8_bits(value: int | tuple[int, ...], bits: int) -> int | tuple[int, ...]:
    """A transparent colour, in the file's bits, as the pixels of that colour read."""
    if isinstance(value, tuple):
        return tuple(part >> 8 if bits == 16 else part & 0xFF for part in value)
    return value * 255 // ((1 << bits) - 1) if bits < 8 else value & 0xFF


def _sentence(name: str, error: Exception) -> str:
    text = in_words(error)
    if isinstance(error, NotImplementedError) or text.startswith("unsupported"):
        return f"unsupported format: {name}: {text.removeprefix('unsupported: ')}"
    return f"{'truncated' if 'truncated' in text.lower() else 'corrupt'} {name}: {text}"
